"""What may be set: the models, the loader that explains mistakes, and the registry of error codes.

Nothing is imported here, so that `import config.model` costs no more than pydantic itself.
This package depends on nothing else of the product; everything else may depend on it.
"""
