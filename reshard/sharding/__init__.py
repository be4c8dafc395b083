"""Which part of an array goes where: meshes, specs and rules, without devices."""
