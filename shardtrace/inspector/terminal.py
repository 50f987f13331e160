def render(record): return ""
