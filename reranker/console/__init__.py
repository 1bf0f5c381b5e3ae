"""The operator's page and the API's: static files without anything from elsewhere, which the gateway serves."""
