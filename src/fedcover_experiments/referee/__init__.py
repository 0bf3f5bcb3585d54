"""The referee: methods of the field, at the field's own settings, in one table."""
