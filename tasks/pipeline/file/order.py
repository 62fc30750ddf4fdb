"""Which steps of a pipeline wait for which others."""

from collections.abc import Collection, Mapping, Sequence


def find_cycle(needs: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return a cycle of steps that wait for each other, its first step repeated at the end; empty: there is none."""
    done: set[str] = set()
    for start in needs:
        path: list[str] = []
        on_path: set[str] = set()
        # (step, those of its needs that are to be looked at): no recursion, since chains may be long
        stack = [(start, iter(sorted(needs.get(start, ()))))] if start not in done else []
        path, on_path = [start], {start}
        while stack:
            step, rest = stack[-1]
            for need in rest:
                if need in on_path:
                    return (*path[path.index(need) :], need)
                if need not in done and need in needs:
                    stack.append((need, iter(sorted(needs[need]))))
                    path.append(need)
                    on_path.add(need)
                    break
            else:
                stack.pop()
                path.pop()
                on_path.discard(step)
                done.add(step)
    return ()


def ready(
    needs: Mapping[str, Collection[str]], finished: Collection[str], begun: Collection[str]
) -> Sequence[str]:
    """Return the steps that may begin now: all they need has finished, and they have not begun."""
    return [step for step, wanted in needs.items() if step not in begun and set(wanted) <= set(finished)]


def in_order(needs: Mapping[str, Collection[str]]) -> Sequence[str]:
    """Return the steps so that each comes after all that it waits for; those of a cycle are left out."""
    found: dict[str, None] = {}
    while more := [step for step in ready(needs, found, found) if step not in found]:
        found.update(dict.fromkeys(more))
    return tuple(found)


def hopeless(needs: Mapping[str, Collection[str]], failed: Collection[str]) -> dict[str, str]:
    """Return the steps that can never begin, each with the failed step that they wait for, near or far."""
    found: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for step, wanted in needs.items():
            if step in found or step in failed:
                continue
            for need in sorted(wanted):
                if need in failed or need in found:
                    found[step] = found.get(need, need)
                    changed = True
                    break
    return found
