// Shows what /openapi.json says. Swagger UI would ask a server elsewhere to check the description: not here.
"use strict";

SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
});
