"""The block pool: who holds which KV block, which blocks can be found again, which are evicted.

A block is in exactly one of three places: *free* (holds nothing), *cached* (held by nobody, but its
contents are known and can be reused as a prefix; reclaimed least recently used first), or *held* by
one or more sequences. Contents are known by an ``Entry``: the block's token ids and the entry of
its parent. A lookup walks the chain of hashes and accepts a block only if its token ids are equal
and its parent is the very entry matched before it, so a hash collision can never hand out
another prefix's block.

The pool knows nothing of tensors; block ids index them elsewhere.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenpath.policy.tiers import BlockName


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is known of a cached block's contents. Compared by identity."""

    block: int
    hash: int
    token_ids: tuple[int, ...]
    parent: Entry | None
    cache_key: tuple[str, str]
    name: BlockName | None = None
    """Under which its contents are kept when the pool has no room for them; None: they are not."""

    def holds(
        self, token_ids: tuple[int, ...], parent: Entry | None, cache_key: tuple[str, str]
    ) -> bool:
        """Whether this is the block of exactly these tokens after exactly that prefix."""
        return self.parent is parent and self.token_ids == token_ids and self.cache_key == cache_key


class BlockPool:
    """Reference-counted blocks with prefix reuse. Single-threaded, like its scheduler."""

    def __init__(
        self, num_blocks: int, *, on_evict: Callable[[BlockName, int], None] | None = None
    ) -> None:
        """``on_evict`` is told the name and the block of contents that are about to be lost.

        It is called before the block is given to anybody else.
        """
        self.total = num_blocks
        self._on_evict = on_evict
        self.evictions_total = 0
        self._references = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._entry_of: dict[int, Entry] = {}
        self._by_hash: dict[int, Entry] = {}

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can hand out: free ones and reclaimable cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks held by nobody whose contents can be reused."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.total - self.available

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, evicting cached ones; None, and no change, if too few."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._evict(self._forget(block))
            self._references[block] = 1
            taken.append(block)
        return taken

    def is_cached(self, block: int) -> bool:
        """Whether the block is held by nobody, so that holding it makes it unavailable."""
        return block in self._cached

    def hold(self, block: int) -> None:
        """Add a reference to a block found by ``match``."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in the sequence's order.

        The last blocks become the first to be evicted: a prefix is useful without its tail, a
        tail never without its prefix.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._entry_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def match(
        self,
        hashes: Iterable[int],
        blocks_of_tokens: Iterable[tuple[int, ...]],
        cache_key: tuple[str, str],
    ) -> list[Entry]:
        """Longest known chain for these blocks. Takes no references."""
        found: list[Entry] = []
        parent: Entry | None = None
        for value, token_ids in zip(hashes, blocks_of_tokens, strict=False):
            entry = self._by_hash.get(value)
            if entry is None or not entry.holds(token_ids, parent, cache_key):
                break
            found.append(entry)
            parent = entry
        return found

    def register(
        self,
        block: int,
        value: int,
        token_ids: tuple[int, ...],
        parent: Entry | None,
        cache_key: tuple[str, str],
        name: BlockName | None = None,
    ) -> Entry | None:
        """Make a held, fully computed block findable under its hash.

        If the same contents are already known in another block, that entry is returned and
        ``block`` stays private to its holder. Returns None, and registers nothing, when the hash
        is taken by other contents that are still reachable (a collision).
        """
        known = self._by_hash.get(value)
        if known is not None:
            if known.holds(token_ids, parent, cache_key):
                return known
            if self._reachable(known):
                return None
            self._unregister(known)
        entry = Entry(block, value, token_ids, parent, cache_key, name)
        self._entry_of[block] = entry
        self._by_hash[value] = entry
        return entry

    def cached_contents(self) -> Iterable[tuple[BlockName, int]]:
        """Name and block of all that could be evicted and has a name, the next victim first."""
        for block in self._cached:
            name = self._entry_of[block].name
            if name is not None:
                yield name, block

    def clear_cache(self) -> None:
        """Forget every prefix; blocks held by sequences stay theirs."""
        for entry in list(self._entry_of.values()):
            self._unregister(entry)

    def _reachable(self, entry: Entry) -> bool:
        """Whether a match can still arrive at the entry: all its ancestors are registered."""
        ancestor = entry.parent
        while ancestor is not None:
            if self._by_hash.get(ancestor.hash) is not ancestor:
                return False
            ancestor = ancestor.parent
        return True

    def _unregister(self, entry: Entry) -> None:
        self._forget(entry.block)
        if entry.block in self._cached:
            del self._cached[entry.block]
            self._free.append(entry.block)

    def _evict(self, entry: Entry) -> None:
        self.evictions_total += 1
        if self._on_evict is not None and entry.name is not None:
            self._on_evict(entry.name, entry.block)

    def _forget(self, block: int) -> Entry:
        entry = self._entry_of.pop(block)
        del self._by_hash[entry.hash]
        return entry

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless every block is in exactly one place.

        ``holders`` are the block lists of all live sequences.
        """
        held = Counter(block for blocks in holders for block in blocks)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, f"blocks both free and cached: {free & cached}"
        for block, references in enumerate(self._references):
            assert references == held[block], (
                f"block {block} has {references} references but {held[block]} holders"
            )
            places = (block in free) + (block in cached) + (references > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert block not in free or block not in self._entry_of, f"free block {block} is known"
            assert block not in cached or block in self._entry_of, f"block {block} has no entry"
        for value, entry in self._by_hash.items():
            assert entry.hash == value, f"hash {value:x} leads to another hash's entry"
            assert self._entry_of.get(entry.block) is entry, f"stale entry of block {entry.block}"
        assert len(self._by_hash) == len(self._entry_of), "an entry cannot be found by its hash"
