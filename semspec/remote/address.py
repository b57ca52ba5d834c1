"""Whether a model is a server. Nothing else, so that the command line may ask before it loads anything."""


def is_url(model: object) -> bool:
    return str(model).lower().startswith(("http://", "https://"))
