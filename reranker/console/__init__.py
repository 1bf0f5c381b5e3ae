"""The operator's page: static files without anything from elsewhere, served by the gateway under /console."""
