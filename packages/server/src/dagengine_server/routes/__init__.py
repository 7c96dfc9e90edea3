"""The endpoints, one module per subject: checked bodies to engine requests, events to answers."""
