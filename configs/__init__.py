"""Gin files, one folder a method, installed as data beside the code."""
