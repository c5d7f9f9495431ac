"""jaxinfer in other libraries: classes with their interfaces. A library is imported with its own module only."""
