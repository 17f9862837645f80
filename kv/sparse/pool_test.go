// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// node is a pool in one region, and all entries of its sets in another.
type node struct {
	*Pool
	step  *Step
	peer  *engine.Peer
	slots *engine.Region
	all   *engine.Region
	cfg   Config
}

const (
	shift     = 4 // of blocks of 16 entries
	perSet    = 4096
	allStride = 672
)

func openNode(t *testing.T, cfg Config, wrap func(engine.Backend) engine.Backend) *node {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	var backend engine.Backend = b
	if wrap != nil {
		backend = wrap(b)
	}
	e, err := engine.Open(engine.Config{Name: "node", Backends: []engine.Backend{backend}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	n := &node{cfg: cfg}
	region := func(name string, bytes int) *engine.Region {
		m, err := e.Alloc(uint64(bytes), engine.AllocOptions{})
		require.NoError(t, err)
		r, err := e.Register(name, m.Segment())
		require.NoError(t, err)
		return r
	}
	layers := max(cfg.Layers, 1)
	n.slots = region("slots", 256+layers*cfg.Sets*(cfg.Slots+31)*int(max(cfg.Stride, cfg.Entry)))
	n.all = region("all", layers*cfg.Sets*perSet*allStride)
	for layer := range layers {
		for i := range cfg.Sets * perSet {
			p := n.entry(layer, uint32(i))
			number := uint32(layer*cfg.Sets*perSet + i + 1)
			binary.LittleEndian.PutUint32(p, number)
			binary.LittleEndian.PutUint32(p[len(p)-4:], number)
		}
	}
	cfg.Engine, cfg.Memory, cfg.Base = e, n.slots, 256
	n.Pool, err = New(cfg)
	require.NoError(t, err)
	self, err := e.Self()
	require.NoError(t, err)
	from, err := self.Remote("all")
	require.NoError(t, err)
	n.peer = self
	n.step, err = n.NewStep(self, from, allStride, engine.Route{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.step.Close()) })
	return n
}

// entry is where an entry, counted over all sets, lies with all others.
func (n *node) entry(layer int, i uint32) []byte {
	at := n.base(layer) + uint64(i)*allStride
	return n.all.Bytes()[at : at+n.cfg.Entry]
}

func (n *node) base(layer int) uint64 { return uint64(layer*n.cfg.Sets*perSet) * allStride }

func (n *node) bases() (list []uint64) {
	for layer := range max(n.cfg.Layers, 1) {
		list = append(list, n.base(layer))
	}
	return list
}

// ask sets a batch of all sets. Each has its blocks backwards.
func (n *node) ask(entries []uint32) {
	b := &n.step.Batch
	*b = Batch{Shift: shift, Entries: entries, Slots: make([]uint32, len(entries)),
		Counts: make([]uint32, n.cfg.Sets)}
	for set := range uint32(n.cfg.Sets) {
		b.Sets, b.Starts = append(b.Sets, set), append(b.Starts, uint32(len(b.Blocks)))
		for i := range uint32(perSet >> shift) {
			b.Blocks = append(b.Blocks, (set+1)*perSet>>shift-1-i)
		}
	}
	b.Starts = append(b.Starts, uint32(len(b.Blocks)))
}

// check compares what lies in the slots of the batch with all entries.
func (n *node) check(t *testing.T) {
	t.Helper()
	b := &n.step.Batch
	for i, slot := range b.Slots {
		if b.Entries[i] == None {
			continue
		}
		set := i / (len(b.Entries) / len(b.Sets))
		block := b.Blocks[b.Starts[set]+b.Entries[i]>>shift]
		for layer := range max(n.cfg.Layers, 1) {
			at := n.At(layer, slot)
			if !bytes.Equal(n.entry(layer, block<<shift|b.Entries[i]&(1<<shift-1)),
				n.slots.Bytes()[at:at+n.cfg.Entry]) {
				t.Fatalf("layer %d, entry %d of set %d: slot %d has other bytes", layer,
					b.Entries[i], set, slot)
			}
		}
	}
}

func TestSteps(t *testing.T) {
	for _, cfg := range []Config{
		{Entry: 656, Sets: 3, Slots: 300},
		{Entry: 584, Stride: 592, Sets: 2, Slots: 64},
		{Entry: 132, Sets: 2, Slots: 128, Layers: 3},
		{Entry: 4, Sets: 1, Slots: 32},
	} {
		t.Run(fmt.Sprintf("%d bytes", cfg.Entry), func(t *testing.T) {
			n := openNode(t, cfg, nil)
			random := rand.New(rand.NewPCG(5, 5))
			entries := make([]uint32, cfg.Sets*cfg.Slots/2)
			for i := range entries {
				entries[i] = random.Uint32N(perSet)
			}
			for range 50 {
				n.ask(entries)
				require.NoError(t, n.step.Lookup())
				require.NoError(t, n.step.Fetch(n.bases()...))
				if len(n.step.Misses.Slots) > 0 {
					require.ErrorIs(t, n.step.Lookup(), driver.ErrBusy)
					require.ErrorIs(t, n.step.Fetch(0), driver.ErrBusy)
					require.ErrorIs(t, n.step.Close(), driver.ErrBusy)
				}
				require.NoError(t, n.step.Wait(t.Context()))
				n.check(t)
				entries = slices.Clone(entries)
				for range len(entries) / 5 {
					entries[random.IntN(len(entries))] = random.Uint32N(perSet)
				}
				entries[0] = None
			}
		})
	}
}

// A new entry gets its slot by Lookup, its bytes by the program, and its place with all others by
// Store.
func TestStore(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	n.ask([]uint32{7, 9})
	ended := make(chan struct{}, 2)
	require.NoError(t, n.step.OnDone(func() { ended <- struct{}{} }))
	require.NoError(t, n.step.Lookup())
	for i, slot := range n.step.Misses.Slots {
		at := n.At(0, slot)
		copy(n.slots.Bytes()[at:at+656], bytes.Repeat([]byte{byte(0xa0 + i)}, 656))
	}
	require.NoError(t, n.step.Store(0))
	require.NoError(t, n.step.Wait(t.Context()))
	<-ended
	require.NotEmpty(t, n.step.Misses.Slots)
	n.check(t)
	require.Equal(t, bytes.Repeat([]byte{0xa1}, 656), n.entry(0, n.step.Misses.From[1]))
}

// Behind a Warm the first steps miss no more than what is new in them.
func TestWarm(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 320}, nil)
	random := rand.New(rand.NewPCG(6, 6))
	top := make([]uint32, 2*128)
	for i := range top {
		top[i] = random.Uint32N(perSet)
	}
	var windows [][]uint32
	for range 32 {
		windows = append(windows, slices.Clone(top))
		for range 20 {
			top[random.IntN(len(top))] = random.Uint32N(perSet)
		}
	}
	n.ask(top)
	require.NoError(t, n.step.Warm(windows...))
	require.Greater(t, len(n.step.Misses.Slots), 256)
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	n.check(t)
	n.ask(top)
	require.NoError(t, n.step.Lookup())
	require.LessOrEqual(t, len(n.step.Misses.Slots), 20)
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	n.check(t)

	for set := range uint32(2) {
		require.NoError(t, n.Reset(set))
	}
	bad := slices.Clone(top)
	bad[3] = perSet
	require.ErrorIs(t, n.step.Warm(top, bad), driver.ErrBounds)
	n.ask(top)
	require.NoError(t, n.step.Lookup())
	require.Greater(t, len(n.step.Misses.Slots), 200, "what was not brought is not there")
}

// What a failed or aborted Fetch was to bring is missed again.
func TestFailedFetch(t *testing.T) {
	broken := errors.New("broken")
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, func(b engine.Backend) engine.Backend {
		w, err := fault.Wrap(b, 1, fault.Rule{On: fault.Read, Most: 1, Do: fault.Fail(broken)},
			fault.Rule{On: fault.Read, Skip: 1, Most: 1, Do: fault.Swallow()})
		require.NoError(t, err)
		return w
	})
	n.ask([]uint32{1, 2, 3, 4})
	missesAll := func() {
		t.Helper()
		require.NoError(t, n.step.Lookup())
		require.Len(t, n.step.Misses.Slots, 4)
	}
	missesAll()
	require.ErrorIs(t, n.step.Fetch(0, 1), driver.ErrBounds) // of two layers
	missesAll()
	require.NoError(t, n.step.Fetch(0))
	require.ErrorIs(t, n.step.Wait(t.Context()), broken)
	missesAll()
	require.NoError(t, n.step.Fetch(0)) // is swallowed
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, n.step.Wait(ctx), context.Canceled)
	require.NotNil(t, n.step.Done())
	require.NoError(t, n.step.Abort(t.Context()))
	require.Nil(t, n.step.Done())
	missesAll()
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	n.check(t)
}

// What was not brought is not there, for another Lookup, another Step, and behind a Warm.
func TestNotBrought(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	n.ask([]uint32{1, 2, 3, 4})
	missesAll := func() {
		t.Helper()
		require.NoError(t, n.step.Lookup())
		require.Len(t, n.step.Misses.Slots, 4)
	}
	missesAll()
	missesAll()
	require.NoError(t, n.step.Warm(n.step.Batch.Entries))
	require.Len(t, n.step.Misses.Slots, 4)
	missesAll()
	other, err := n.NewStep(n.peer, n.step.from, allStride, engine.Route{})
	require.NoError(t, err)
	other.Batch = n.step.Batch
	require.NoError(t, n.step.Close())
	n.step = other
	missesAll()
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	require.NoError(t, n.step.Lookup())
	require.Empty(t, n.step.Misses.Slots)

	// A block whose entries 32 bits cannot count is refused, not taken for another one.
	n.ask([]uint32{5, 6, 7, 8})
	n.step.Batch.Blocks[0] = 1 << (32 - shift)
	missesAll()
	require.ErrorIs(t, n.step.Fetch(0), driver.ErrBounds)
	n.ask([]uint32{5, 6, 7, 8})
	missesAll()
}

// A set is one step's from a Lookup that misses until what it missed has come, or is forgotten.
func TestSetOfAnotherStep(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	other, err := n.NewStep(n.peer, n.step.from, allStride, engine.Route{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	refused := func() {
		t.Helper()
		other.Batch = n.step.Batch
		require.ErrorIs(t, other.Lookup(), driver.ErrBusy)
		require.NoError(t, other.Fetch(0), "nothing was missed")
		require.ErrorIs(t, other.Warm(other.Batch.Entries), driver.ErrBusy)
		require.ErrorIs(t, n.Reset(1), driver.ErrBusy)
	}
	n.ask([]uint32{1, 2, 3, 4})
	require.NoError(t, n.step.Lookup())
	refused()
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	require.NoError(t, n.Reset(1))
	require.NoError(t, other.Lookup())
	require.Len(t, other.Misses.Slots, 2)
	other.Batch.Sets = other.Batch.Sets[:1] // of one set, all of whose entries are there
	other.Batch.Starts = other.Batch.Starts[:2]
	other.Batch.Entries, other.Batch.Slots = other.Batch.Entries[:2], other.Batch.Slots[:2]
	other.Batch.Counts = other.Batch.Counts[:1]
	require.NoError(t, other.Lookup())
	require.NoError(t, n.step.Warm([]uint32{5, 6, 7, 8}, []uint32{5, 6, 7, 8}))
	refused()
	require.ErrorIs(t, n.step.Fetch(0, 1), driver.ErrBounds) // forgets them
	require.NoError(t, n.Reset(1))
	require.NoError(t, other.Lookup())
}

// What has come, or was given up, moves no more: its slots may be another step's since.
func TestMovesOnce(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	other, err := n.NewStep(n.peer, n.step.from, allStride, engine.Route{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	n.ask([]uint32{1, 2, 3, 4})
	require.NoError(t, n.step.Lookup())
	require.NoError(t, n.step.Fetch(0))
	require.NoError(t, n.step.Wait(t.Context()))
	require.NoError(t, n.Reset(0))
	require.NoError(t, n.Reset(1))
	other.Batch = n.step.Batch
	require.NoError(t, other.Lookup())
	require.Len(t, other.Misses.Slots, 4)
	for _, again := range []func(...uint64) error{n.step.Fetch, n.step.Store} {
		require.NoError(t, again(0))
		require.Nil(t, n.step.Done(), "nothing is under way")
	}
	require.NoError(t, other.Fetch(0))
	for !other.underWay.Done() {
		runtime.Gosched()
	}
	require.NoError(t, other.Abort(t.Context())) // of what has ended
	require.NoError(t, n.step.Lookup())
	require.Len(t, n.step.Misses.Slots, 4)
}

// No step looks up a set while Reset empties it.
func TestResetAlone(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	n.ask([]uint32{1, 2, 3, 4})
	stand := testpoint.Stand(t, "sparse: reset")[0]
	ended := make(chan error)
	go func() { ended <- n.Reset(1) }()
	<-stand.Came
	require.ErrorIs(t, n.step.Lookup(), driver.ErrBusy)
	stand.GoOn()
	require.NoError(t, <-ended)
	require.NoError(t, n.step.Lookup())
}

// An Abort that cannot prove what the peer does says so, and the pool goes on: its own memory is
// free.
func TestUnprovenAbort(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, func(b engine.Backend) engine.Backend {
		for _, do := range []fault.Deed{fault.Fail(driver.ErrUnproven), fault.Drop()} {
			w, err := fault.Wrap(b, 1, fault.Rule{On: fault.Write, Do: do})
			require.NoError(t, err)
			b = w
		}
		return b
	})
	n.ask([]uint32{1, 2, 3, 4})
	require.NoError(t, n.step.Lookup())
	require.NoError(t, n.step.Store(0))
	require.ErrorIs(t, n.step.Abort(t.Context()), driver.ErrUnproven)
	require.NoError(t, n.step.Lookup())
	require.Len(t, n.step.Misses.Slots, 4)
}

// late is a context that is over, and calls end before it says why.
type late struct {
	context.Context
	end func()
}

func (c late) Err() error {
	c.end()
	return c.Context.Err()
}

// A transfer that ends, badly, as the context of Wait does: Wait says how it has ended.
func TestEndsWithContext(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, func(b engine.Backend) engine.Backend {
		w, err := fault.Wrap(b, 1, fault.Rule{On: fault.Read, Do: fault.Swallow()})
		require.NoError(t, err)
		return w
	})
	n.ask([]uint32{1, 2, 3, 4})
	require.NoError(t, n.step.Lookup())
	require.NoError(t, n.step.Fetch(0))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	transfer := n.step.underWay
	require.ErrorIs(t, n.step.Wait(late{over, func() {
		require.NoError(t, transfer.Abort(t.Context()))
	}}), driver.ErrAborted)
	require.Nil(t, n.step.Done())
}

func TestNoTransfers(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "node", Backends: []engine.Backend{b},
		TransfersMax: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	self, err := e.Self()
	require.NoError(t, err)
	p := &Pool{cfg: Config{Engine: e, Entry: 656}}
	_, err = p.NewStep(self, nil, 656, engine.Route{})
	require.ErrorIs(t, err, engine.ErrFull)
	transfer, err := e.NewTransfer(self, engine.Read, engine.Route{})
	require.NoError(t, err, "the step has given its first one back")
	require.NoError(t, transfer.Close())
}

func TestRefused(t *testing.T) {
	n := openNode(t, Config{Entry: 656, Sets: 2, Slots: 64}, nil)
	good := n.cfg
	good.Engine, good.Memory = n.Pool.cfg.Engine, n.slots
	for name, change := range map[string]func(c *Config){
		"no engine": func(c *Config) { c.Engine = nil },
		"no bytes":  func(c *Config) { c.Entry = 0 },
		"odd bytes": func(c *Config) { c.Entry = 655 },
		"stride":    func(c *Config) { c.Stride = 600 },
		"layers":    func(c *Config) { c.Layers = -1 },
		"sets":      func(c *Config) { c.Sets = 0 },
		"room":      func(c *Config) { c.Base = n.slots.Size() - 100 },
		"far apart": func(c *Config) { c.Stride = 1<<60 + 656 },
		"no room":   func(c *Config) { c.Base = n.slots.Size() + 1 },
	} {
		cfg := good
		change(&cfg)
		_, err := New(cfg)
		require.Error(t, err, name)
	}
	require.ErrorIs(t, n.Reset(2), driver.ErrBounds)
	_, err := n.NewStep(nil, nil, 655, engine.Route{})
	require.ErrorIs(t, err, driver.ErrBounds)
	require.NoError(t, n.step.Wait(t.Context()))
	require.NoError(t, n.step.Fetch(0), "nothing was missed")
}
