"""The optional parts of a decode step, one file each; `jkv.engine.parts.table` lists them."""
