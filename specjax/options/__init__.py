"""Option lists: frozen dataclasses, which are read from a command line and from files.

A command or a job has one dataclass, whose fields are its options.  `fields.option` gives a field
its help, `command.parse` reads it with tyro, and the classes of the other modules are shared.
"""
