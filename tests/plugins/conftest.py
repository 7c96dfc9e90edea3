"""The example plug-in's own tests run in an interpreter that has it installed, not in this one."""

collect_ignore = ["example_plugin"]
