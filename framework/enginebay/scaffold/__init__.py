"""``enginebay new``: a complete package for a plugin of one's own, from templates. It imports no torch and no plugin.

``templates/any`` is common to the kinds, and each kind has a folder of its own. A template is a `string.Template`; its path,
less ``.tmpl`` and with the module's name in place of ``module``, is where it goes.
"""
