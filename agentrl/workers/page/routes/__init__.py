"""What the page asks: a route for each question, and the shapes of the answers as OpenAPI documents them."""
