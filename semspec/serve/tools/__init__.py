"""Calls of tools in what a model writes, one table entry or parser for each family of models."""
