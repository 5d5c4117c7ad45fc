"""The version of the kit: it changes whenever a check is added, removed or made stricter."""

KIT_VERSION = "1.4"
