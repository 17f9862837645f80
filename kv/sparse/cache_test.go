// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// cached is a node whose sets of two layers lie in blocks of a cache: 16 entries of the first
// layer, and behind them those of the second.
type cached struct {
	*node
	ns   *cache.Namespace
	keys []cache.Key
	pin  *cache.Pin
}

const (
	layerBytes = allStride << shift
	sequence   = 8 // blocks of a set
)

func openCached(t *testing.T, wrap func(engine.Backend) engine.Backend) *cached {
	t.Helper()
	n := &cached{node: openNode(t, Config{Entry: 656, Sets: 2, Slots: 96, Layers: 2}, wrap)}
	c, err := cache.Open(t.Context(), cache.Config{Engine: n.Pool.cfg.Engine, Blocks: 128,
		Memory: cache.MemoryConfig{Path: filepath.Join(t.TempDir(), "memory"), Bytes: 2 << 20,
			Extent: 64 << 10}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	n.ns, err = c.Namespace("model", cache.NamespaceOptions{HoldMax: 1 << 20})
	require.NoError(t, err)
	from := cache.Place{Peer: n.peer, Remote: n.step.from, Stride: layerBytes, Run: layerBytes,
		Loops: []cache.Axis{{N: 2, By: n.base(1)}}}
	for i := range uint32(2 * sequence) {
		n.keys = append(n.keys, cache.KeyOf([]byte{byte(i)}))
		from.Slots = append(from.Slots, i/sequence*(perSet>>shift)+i%sequence)
	}
	require.NoError(t, n.ns.Store(t.Context(), n.keys, from).Wait(t.Context()))
	n.pin, err = n.ns.Pin(t.Context(), n.keys, 0)
	require.NoError(t, err)
	at, err := n.pin.Place()
	require.NoError(t, err)
	require.NoError(t, n.step.Close())
	n.step, err = n.NewStep(at.Peer, at.Remote, allStride, engine.Route{})
	require.NoError(t, err)
	n.step.Page, n.step.Pins = at.Stride, []Holder{n.pin}
	n.step.Batch = Batch{Shift: shift, Sets: []uint32{0, 1}, Starts: []uint32{0, sequence,
		2 * sequence}, Blocks: at.Slots, Counts: make([]uint32, 2)}
	return n
}

func (n *cached) lookup(t *testing.T, entries []uint32) {
	t.Helper()
	b := &n.step.Batch
	b.Entries, b.Slots = entries, make([]uint32, len(entries))
	require.NoError(t, n.step.Lookup())
}

// check compares the slots of the batch with what was stored; fetched: of both layers.
func (n *cached) checkSlots(t *testing.T) {
	t.Helper()
	for i, slot := range n.step.Batch.Slots {
		for layer := range 2 {
			at, set := n.At(layer, slot), uint32(2*i/len(n.step.Batch.Slots))
			require.Equal(t, n.entry(layer, set*perSet+n.step.Batch.Entries[i]),
				n.slots.Bytes()[at:at+656], "layer %d, entry %d", layer, i)
		}
	}
}

// The misses of sets whose entries lie in pinned blocks of a cache come from there, and what has
// come is equal to the bit.
func TestFromCache(t *testing.T) {
	n := openCached(t, nil)
	random := rand.New(rand.NewPCG(7, 7))
	for range 20 {
		entries := make([]uint32, 2*40)
		for i := range entries {
			entries[i] = random.Uint32N(sequence << shift)
		}
		n.lookup(t, entries)
		require.NoError(t, n.step.Fetch(0, layerBytes))
		require.NoError(t, n.step.Wait(t.Context()))
		n.checkSlots(t)
	}

	n.step.Page = 1<<31 + 1
	require.ErrorIs(t, n.step.Lookup(), driver.ErrBounds)
	n.step.Page = 1 << 31
	n.step.Batch.Blocks = append([]uint32{1 << (32 - shift) / 2}, n.step.Batch.Blocks[1:]...)
	require.NoError(t, n.Reset(0))
	n.lookup(t, []uint32{1, 1})
	require.ErrorIs(t, n.step.Fetch(0, layerBytes), driver.ErrBounds)
}

// Blocks of a pin that has ended are not read. One that ends meanwhile keeps its place until what
// was begun has ended, as an abort ends it.
func TestPinEnds(t *testing.T) {
	n := openCached(t, func(b engine.Backend) engine.Backend {
		w, err := fault.Wrap(b, 1, fault.Rule{On: fault.Write, Do: fault.Swallow()})
		require.NoError(t, err)
		return w
	})
	missesAll := func() {
		t.Helper()
		n.lookup(t, []uint32{1, 2, 3, 4})
		require.Len(t, n.step.Misses.Slots, 4)
	}
	draft, err := n.ns.Draft(1, layerBytes)
	require.NoError(t, err)
	n.step.Pins = []Holder{draft, n.pin}
	missesAll()
	require.NoError(t, n.step.Store(0, layerBytes)) // is swallowed
	draft.Close()
	select {
	case <-draft.Done():
		t.Fatal("its memory is another's")
	default:
	}
	require.NoError(t, n.step.Abort(t.Context()))
	<-draft.Done()
	missesAll()
	require.ErrorIs(t, n.step.Fetch(0, layerBytes), cache.ErrPinEnded)
	n.step.Pins = n.step.Pins[1:]
	missesAll()
	require.NoError(t, n.step.Fetch(0, layerBytes))
	require.NoError(t, n.step.Wait(t.Context()))
	n.pin.Close()
	<-n.pin.Done()
	n.lookup(t, []uint32{5, 6, 7, 8})
	require.ErrorIs(t, n.step.Fetch(0, layerBytes), cache.ErrPinEnded)
}

// Where nothing proves that a Store has ended the draft's memory is nobody else's, and the pool and
// the pin go on.
func TestUnprovenDraft(t *testing.T) {
	n := openCached(t, func(b engine.Backend) engine.Backend {
		for _, do := range []fault.Deed{fault.Fail(driver.ErrUnproven), fault.Drop()} {
			w, err := fault.Wrap(b, 1, fault.Rule{On: fault.Write, Do: do})
			require.NoError(t, err)
			b = w
		}
		return b
	})
	draft, err := n.ns.Draft(1, layerBytes)
	require.NoError(t, err)
	n.step.Pins = []Holder{n.pin, draft}
	n.lookup(t, []uint32{1, 2, 3, 4})
	require.NoError(t, n.step.Store(0, layerBytes))
	draft.Close()
	require.ErrorIs(t, n.step.Abort(t.Context()), driver.ErrUnproven)
	select {
	case <-draft.Done():
		t.Fatal("its memory is another's")
	default:
	}
	n.step.Pins = n.step.Pins[:1]
	n.lookup(t, []uint32{1, 2, 3, 4})
	require.Len(t, n.step.Misses.Slots, 4)
	require.NoError(t, n.step.Fetch(0, layerBytes))
	require.NoError(t, n.step.Wait(t.Context()))
	n.checkSlots(t)
}

// New entries go to a draft in the cache's memory; what is full becomes a block.
func TestDraft(t *testing.T) {
	n := openCached(t, nil)
	draft, err := n.ns.Draft(2, 2*layerBytes)
	require.NoError(t, err)
	at, err := draft.Place()
	require.NoError(t, err)
	b := &n.step.Batch
	b.Starts = []uint32{0, sequence + 1, 2*sequence + 2}
	b.Blocks = append(append(append([]uint32{}, b.Blocks[:sequence]...), at.Slots[0]),
		append(b.Blocks[sequence:], at.Slots[1])...)
	n.step.Pins = append(n.step.Pins, draft)
	for i := range uint32(1 << shift) {
		entry := sequence<<shift + i
		n.lookup(t, []uint32{entry, entry})
		for layer := range 2 {
			for set, slot := range n.step.Batch.Slots {
				at := n.At(layer, slot)
				copy(n.slots.Bytes()[at:], n.entry(layer, uint32(set*perSet)+entry))
			}
		}
		require.NoError(t, n.step.Store(0, layerBytes))
		require.NoError(t, n.step.Wait(t.Context()))
	}
	keys := []cache.Key{cache.KeyOf([]byte("new")), cache.KeyOf([]byte("newer"))}
	require.NoError(t, n.ns.Store(t.Context(), keys, at).Wait(t.Context()))
	pin, err := n.ns.Pin(t.Context(), keys, 0)
	require.NoError(t, err)
	require.Equal(t, []cache.Outcome{cache.Done, cache.Done}, pin.Outcomes())
	draft.Close()
	<-draft.Done()
	blocks, err := pin.Place()
	require.NoError(t, err)
	require.NotEqual(t, at.Slots, blocks.Slots)
	b.Blocks[sequence], b.Blocks[2*sequence+1] = blocks.Slots[0], blocks.Slots[1]
	n.step.Pins[1] = pin
	require.NoError(t, n.Reset(0))
	require.NoError(t, n.Reset(1))
	n.lookup(t, []uint32{sequence<<shift + 3, 9, sequence<<shift + 15, 5})
	require.Len(t, n.step.Misses.Slots, 4)
	require.NoError(t, n.step.Fetch(0, layerBytes))
	require.NoError(t, n.step.Wait(t.Context()))
	n.checkSlots(t)

	_, err = n.ns.Draft(100, 64<<10)
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = n.ns.Draft(17, 64<<10)
	require.ErrorIs(t, err, cache.ErrNoRoom)
}
