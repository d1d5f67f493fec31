"""The rows: tables, views, and what their columns mean. Only the store and the migrations know them."""
