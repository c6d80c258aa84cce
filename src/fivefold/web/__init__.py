"""The page that `fivefold ui` serves: payloads of views, and the small server around them."""
