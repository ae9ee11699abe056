"""The report of one flow: `writing` writes all files; `paths` and `images` draw pictures for it.

`commands.adapt` and `FlowResult.plot` (`flows.result`) call `writing`.
"""
