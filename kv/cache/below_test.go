// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"hash/crc32"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testpoint"
)

// belowFake is a tier below in a map.
type belowFake struct {
	mu     sync.Mutex
	blocks map[string][]byte
	used   map[string]uint32
	reads  int
	broken error           // what Remove and Write say
	hangs  chan struct{}   // Read waits for it, or for its ctx; nil: it does not
	loses  map[string]bool // what Read does not find
}

func newBelowFake() *belowFake {
	return &belowFake{blocks: map[string][]byte{}, used: map[string]uint32{},
		loses: map[string]bool{}}
}

func belowName(space [16]byte, key Key) string { return string(space[:]) + string(key[:]) }

func (b *belowFake) Find(space [16]byte, keys []Key) []BelowBlock {
	b.mu.Lock()
	defer b.mu.Unlock()
	found := make([]BelowBlock, len(keys))
	for k := range keys {
		name := belowName(space, keys[k])
		if p := b.blocks[name]; p != nil {
			found[k] = BelowBlock{uint32(len(p)), crc32.Checksum(p, castagnoli), b.used[name]}
		}
	}
	return found
}

func (b *belowFake) Read(ctx context.Context, space [16]byte, keys []Key, into [][]byte) []bool {
	b.mu.Lock()
	hangs := b.hangs
	b.mu.Unlock()
	there := make([]bool, len(keys))
	if hangs != nil {
		select {
		case <-hangs:
		case <-ctx.Done():
			return there
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range keys {
		name := belowName(space, keys[k])
		if p := b.blocks[name]; len(p) == len(into[k]) && !b.loses[name] {
			copy(into[k], p)
			there[k] = true
			b.reads++
		}
	}
	return there
}

func (b *belowFake) Wants(space [16]byte, key Key, _ uint32, _ bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.blocks[belowName(space, key)] == nil
}

func (b *belowFake) Write(_ context.Context, space [16]byte, key Key, block BelowBlock,
	bytes []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if crc32.Checksum(bytes, castagnoli) != block.CRC {
		return errors.New("another CRC")
	}
	b.blocks[belowName(space, key)] = slices.Clone(bytes)
	b.used[belowName(space, key)] = block.Used
	return b.broken
}

func (b *belowFake) Remove(_ context.Context, space [16]byte, keys []Key) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, key := range keys {
		delete(b.blocks, belowName(space, key))
	}
	return b.broken
}

func (b *belowFake) Stats() BelowStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return BelowStats{Blocks: len(b.blocks)}
}

// openAbove opens a cache of 16 blocks in its last tier above a fake, with so many blocks stored
// that most have left it.
func openAbove(t *testing.T, disk bool) (n *node, b *belowFake, keys []Key) {
	t.Helper()
	path := memoryFile(t)
	b = newBelowFake()
	n = openNode(t, path, 16, func(cfg *Config) {
		cfg.Below, cfg.Blocks = b, 256
		if disk {
			withDisk(path+".disk", 16)(cfg)
		}
	})
	keys = ids(1, 48)
	for k := range keys {
		require.Equal(t, []Outcome{Done}, n.put(t, keys[k:k+1]))
		n.lower()
	}
	return n, b, keys
}

// TestBelow: what has left memory, or the disk, is found in the tier below, and comes back.
func TestBelow(t *testing.T) {
	for name, disk := range map[string]bool{"memory": false, "disk": true} {
		t.Run(name, func(t *testing.T) {
			n, b, keys := openAbove(t, disk)
			m := n.ns.Match(keys)
			require.Equal(t, len(keys), m.Prefix, "%v", m.Blocks)
			require.Equal(t, InObject, m.Blocks[0])
			_, text := n.ns.Explain(keys[0])
			require.Contains(t, text, "in the tier below")
			for part := range slices.Chunk(keys[:32], 8) { // the others they push out
				require.Equal(t, all(Done, len(part)), n.get(t, part))
			}
			require.Positive(t, b.reads)

			// By a Prefetch, a hint and a Pin.
			for k, bring := range []func(keys []Key){
				func(keys []Key) {
					op := n.ns.Prefetch(t.Context(), keys)
					require.NoError(t, op.Wait(t.Context()))
					require.Equal(t, all(Done, len(keys)), op.Outcomes())
				},
				func(keys []Key) {
					r, err := n.ns.Hint(keys, Hint{Kind: HintPrefetch})
					require.NoError(t, err)
					require.Equal(t, HintResult{Applied: len(keys)}, r)
					for n.ns.Match(keys).Blocks[0]&InMemory == 0 {
						time.Sleep(time.Millisecond)
					}
				},
				func(keys []Key) {
					p, err := n.ns.Pin(t.Context(), keys, 0)
					require.NoError(t, err)
					require.Equal(t, all(Done, len(keys)), p.Outcomes())
					p.Close()
				},
			} {
				part := keys[4*k : 4*k+1]
				require.Equal(t, InObject, n.ns.Match(part).Blocks[0])
				bring(part)
				require.NotZero(t, n.ns.Match(part).Blocks[0]&InMemory)
			}

			// One that is removed is nowhere, also where the tier below cannot say so for good.
			require.NoError(t, n.ns.Remove(keys[20:21]))
			b.mu.Lock()
			b.broken = errors.New("no store")
			b.mu.Unlock()
			require.ErrorContains(t, n.ns.Remove(keys[21:22]), "no store")
			require.Equal(t, all(Missing, 2), n.get(t, keys[20:22]))
			require.Equal(t, all(Nowhere, 2), n.ns.Match(keys[20:22]).Blocks)
		})
	}
}

// TestBelowLosesBlocks: what the tier below does not give is a miss, and others of the Load come.
func TestBelowLosesBlocks(t *testing.T) {
	n, b, keys := openAbove(t, false)
	b.mu.Lock()
	b.loses[belowName(n.ns.Digest(), keys[1])] = true
	b.mu.Unlock()
	require.Equal(t, []Outcome{Done, Missing, Done}, n.get(t, keys[:3]))
	require.Equal(t, Done, n.put(t, keys[1:2])[0]) // and may be stored again

	// One that does not answer: the Load ends with its ctx, and nothing is left behind.
	b.mu.Lock()
	b.hangs = make(chan struct{})
	b.mu.Unlock()
	soon, cancel := context.WithCancel(t.Context())
	op := n.ns.Load(soon, keys[4:8], n.at(128, 4))
	for n.ns.Match(keys[4:5]).Blocks[0] != Coming {
		time.Sleep(time.Millisecond)
	}
	other := n.ns.Load(t.Context(), keys[4:8], n.at(140, 4)) // waits for the first, and then reads
	cancel()
	require.NoError(t, op.Wait(t.Context()))
	for _, o := range op.Outcomes() {
		require.Contains(t, []Outcome{Missing, Late}, o)
	}
	close(b.hangs)
	require.NoError(t, other.Wait(t.Context()))
	require.Equal(t, all(Done, 4), n.get(t, keys[4:8]))
}

// TestBelowExpires: the TTL of a namespace holds in the tier below, too.
func TestBelowExpires(t *testing.T) {
	n, b, keys := openAbove(t, false)
	require.Equal(t, InObject, n.ns.Match(keys[:1]).Blocks[0])
	require.NoError(t, n.ns.Set(NamespaceOptions{TTL: time.Hour}))
	require.Equal(t, InObject, n.ns.Match(keys[:1]).Blocks[0])
	b.mu.Lock()
	b.used[belowName(n.ns.Digest(), keys[0])] -= 3601 + 600
	b.mu.Unlock()
	require.Equal(t, Nowhere, n.ns.Match(keys[:1]).Blocks[0])
	require.Equal(t, []Outcome{Missing}, n.get(t, keys[:1]))
}

// TestReplaceAboveATier: the block that a Replace has taken the place of is below no more.
func TestReplaceAboveATier(t *testing.T) {
	n, b, keys := openAbove(t, false)
	require.Equal(t, InObject, n.ns.Match(keys[:1]).Blocks[0])
	content(keysOf(1000)[0], n.mem[:blockBytes])
	op := n.ns.Replace(t.Context(), keys[:1], n.at(0, 1))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, []Outcome{Done}, op.Outcomes())
	require.Zero(t, b.Find(n.ns.Digest(), keys[:1])[0])
}

// TestRemoveBesideALower: a block that is removed, or replaced, while the tier below is given it is
// below no more afterwards.
func TestRemoveBesideALower(t *testing.T) {
	for name, remove := range map[string]func(n *node, keys []Key) error{
		"remove": func(n *node, keys []Key) error { return n.ns.Remove(keys) },
		"replace": func(n *node, keys []Key) error {
			op := n.ns.Replace(t.Context(), keys, n.at(0, 1))
			return op.Wait(t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBelowFake()
			n := openNode(t, memoryFile(t), 16, func(cfg *Config) { cfg.Below, cfg.Blocks = b, 64 })
			stand := testpoint.Stand(t, "cache: lowers")[0]
			require.Equal(t, all(Done, 16), n.put(t, ids(1, 16)))
			go n.lower()
			<-stand.Came
			n.writeMu.Lock()
			keys := []Key{n.writing.key}
			n.writeMu.Unlock()
			before := n.entryOf(keys[0])
			old := n.index.entry(before).crc
			content(keysOf(1000)[0], n.mem[:blockBytes])
			removed := make(chan error, 1)
			go func() { removed <- remove(n, keys) }()
			for n.entryOf(keys[0]) == before {
				time.Sleep(time.Millisecond)
			}
			stand.GoOn()
			require.NoError(t, <-removed)
			n.lowering.Lock() // it has ended
			n.lowering.Unlock()
			require.NotEqual(t, old, b.Find(n.ns.Digest(), keys)[0].CRC)
		})
	}
}

// entryOf is the entry that is found for a key, which may be none.
func (n *node) entryOf(key Key) (entry uint32) {
	n.index.each(n.ns.id, []Key{key}, false, func(_ *shard, _ int, i uint32, _ uint64) {
		if entry = none; i != none && n.index.entry(i).state == present {
			entry = i
		}
	})
	return entry
}
