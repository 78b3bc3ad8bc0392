"""What the tests ask of automata over bytes."""


def accepts(automaton, text):
    """Whether a text is one of an automaton's."""
    state = 0
    for byte in text.encode():
        state = int(automaton.next[state, byte])
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def every(automaton):
    """The texts of an automaton that has few and short ones."""
    left, found = [(0, b"")], set()
    while left:
        state, text = left.pop()
        assert len(text) < 200 and len(found) < 1000, text
        if automaton.accepting[state]:
            found.add(text.decode())
        left += [
            (int(after), text + bytes([byte]))
            for byte, after in enumerate(automaton.next[state])
            if after >= 0
        ]
    return found
