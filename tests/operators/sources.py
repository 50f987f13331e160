"""Where cases come from. Each has ``names()`` and ``cases(name)``."""

import compositions
import database
import module_database

SOURCES = {"operators": database, "modules": module_database, "compositions": compositions}
