def text_of(found,folder,drawn): return ""
