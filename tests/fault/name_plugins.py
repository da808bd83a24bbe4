"""Writes copies of a plugin that differ only in the plugin's name and build id.
usage: name_plugins.py PLUGIN NAME ID FOLDER NEW_NAME...
PLUGIN holds the text NAME and the build id ID (hexadecimal); FOLDER/NEW_NAME.so gets the name NEW_NAME and its own build id."""
import hashlib
import pathlib
import shutil
import sys

plugin, name, build_id, folder, *new_names = sys.argv[1:]
pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
content = pathlib.Path(plugin).read_bytes()
for text in (name.encode() + b"\0", bytes.fromhex(build_id)):
    if content.count(text) != 1:
        sys.exit(f"name_plugins.py: {plugin} holds {text!r} {content.count(text)} times; once is expected")
for new_name in new_names:
    if len(new_name) > len(name):
        sys.exit(f"name_plugins.py: '{new_name}' is longer than the {len(name)} characters that the plugin has for a name")
    new_id = hashlib.sha1(new_name.encode()).digest()[: len(build_id) // 2]
    path = pathlib.Path(folder, f"{new_name}.so")
    path.unlink(missing_ok=True)  # a process that has mapped the old file keeps its contents
    path.write_bytes(content.replace(name.encode() + b"\0", new_name.encode().ljust(len(name) + 1, b"\0"))
                     .replace(bytes.fromhex(build_id), new_id))
    shutil.copymode(plugin, path)
