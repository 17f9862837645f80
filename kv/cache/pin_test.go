// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// flood stores so much that all goes which may.
func (n *node) flood(tb testing.TB, from uint64) {
	tb.Helper()
	for k := range uint64(40) {
		n.put(tb, ids(from+4*k, 4))
	}
}

// seen reports whether a pin shows the blocks of keys.
func seen(p *Pin, keys []Key) error {
	return p.View(func(blocks [][]byte) error {
		want := make([]byte, blockBytes)
		for k, key := range keys {
			if content(key, want); !bytes.Equal(want, blocks[k]) {
				return errors.New("other bytes")
			}
		}
		return nil
	})
}

// TestPin: a pinned block stays in its place until the pin is closed, and no longer; one that is on
// a disk alone comes from there; one that is damaged is told.
func TestPin(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 1024)(c)
		c.Policy = LRU
	})
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 8 * blockBytes}))
	keys := ids(0, 5)
	n.put(t, keys[:4])
	n.flood(t, 1000)
	require.Equal(t, OnDisk, n.ns.Match(keys).Blocks[0])
	p, err := n.ns.Pin(t.Context(), keys, 0)
	require.NoError(t, err)
	require.Equal(t, append(all(Done, 4), Missing), p.Outcomes())
	require.EqualValues(t, 4*blockBytes, n.Stats().Held)
	n.flood(t, 2000)
	require.NoError(t, seen(p, keys[:4]))
	require.Equal(t, InMemory|OnDisk, n.ns.Match(keys).Blocks[3])
	p.Close()
	<-p.Done()
	p.Close()
	require.ErrorIs(t, seen(p, keys[:4]), ErrPinEnded)
	require.Zero(t, n.Stats().Held)
	n.flood(t, 3000)
	require.Equal(t, OnDisk, n.ns.Match(keys).Blocks[0])
	n.drained(t)

	n.put(t, ids(5000, 2))
	n.index.each(n.ns.id, ids(5000, 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
		n.memory.bytesOf(n.index.entry(i).slot, 1)[0] ^= 1
	})
	p, err = n.ns.Pin(t.Context(), ids(5000, 2), 0)
	require.NoError(t, err)
	require.Equal(t, []Outcome{Damaged, Done}, p.Outcomes())
	n.ns.Remove(ids(5001, 1))
	n.flood(t, 6000)
	require.NoError(t, p.View(func(blocks [][]byte) error {
		want := make([]byte, blockBytes)
		content(ids(5001, 1)[0], want)
		require.Nil(t, blocks[0])
		require.Equal(t, want, blocks[1], "removed, and not given to others yet")
		return nil
	}))
	p.Close()
	n.drained(t)
}

// TestPinEnds: a pin ends with its time; a View that runs by then keeps its blocks.
func TestPinEnds(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, func(c *Config) { c.Policy = LRU })
	keys := ids(0, 2)
	n.put(t, keys)
	p, err := n.ns.Pin(t.Context(), keys, time.Millisecond)
	require.NoError(t, err)
	<-p.Done()
	require.ErrorIs(t, seen(p, keys), ErrPinEnded)
	p, err = n.ns.Pin(t.Context(), keys, time.Hour)
	require.NoError(t, err)
	require.NoError(t, p.View(func(blocks [][]byte) error {
		p.Close() // as its time does
		n.flood(t, 100)
		want := make([]byte, blockBytes)
		content(keys[1], want)
		require.Equal(t, want, blocks[1])
		select {
		case <-p.Done():
			t.Error("it has ended")
		default:
		}
		return nil
	}))
	<-p.Done()
	n.flood(t, 500)
	require.Equal(t, 0, n.ns.Match(keys).Prefix)
	n.check(t)
}

// TestHoldMax: Pins and Retain hints keep no more than a namespace may, and all may.
func TestHoldMax(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) { c.HoldMax = 10 * blockBytes })
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 6 * blockBytes}))
	n.put(t, ids(0, 8))
	other, err := n.Namespace("other", NamespaceOptions{HoldMax: 6 * blockBytes})
	require.NoError(t, err)
	op := other.Store(t.Context(), ids(0, 8), n.at(0, 8))
	require.NoError(t, op.Wait(t.Context()))
	_, err = n.ns.Pin(t.Context(), ids(0, 7), 0)
	require.ErrorIs(t, err, ErrNoRoom)
	require.Zero(t, n.Stats().Held)
	p, err := n.ns.Pin(t.Context(), ids(0, 4), 0)
	require.NoError(t, err)
	r, err := n.ns.Hint(ids(4, 4), Hint{Kind: HintRetain, For: time.Hour})
	require.ErrorIs(t, err, ErrNoRoom)
	require.Equal(t, HintResult{Applied: 2, Refused: 2}, r)
	require.EqualValues(t, 2, n.Stats().RefusedHints)
	_, err = other.Pin(t.Context(), ids(0, 5), 0)
	require.ErrorIs(t, err, ErrNoRoom, "of the cache")
	q, err := other.Pin(t.Context(), ids(0, 4), 0)
	require.NoError(t, err)
	require.EqualValues(t, 10*blockBytes, n.Stats().Held)
	p.Close()
	q.Close()
	r, err = n.ns.Hint(ids(4, 4), Hint{Kind: HintRelease})
	require.NoError(t, err)
	require.Equal(t, HintResult{Applied: 4}, r)
	require.Zero(t, n.Stats().Held)
	n.check(t)
}

// TestPinAndClose: the cache's Close waits for a View, and ends the pins.
func TestPinAndClose(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	keys := ids(0, 2)
	n.put(t, keys)
	p, err := n.ns.Pin(t.Context(), keys, 0)
	require.NoError(t, err)
	closed := make(chan error, 1)
	require.NoError(t, p.View(func(blocks [][]byte) error {
		go func() { closed <- n.Cache.Close() }()
		until(func() bool { return n.life.Err() != nil })
		for range 5000 { // Close has all the time that it wants
			runtime.Gosched()
			n.mu.Lock()
			open := n.memory != nil
			n.mu.Unlock()
			require.True(t, open)
		}
		require.NotZero(t, blocks[0][5])
		return nil
	}))
	require.NoError(t, <-closed)
	require.ErrorIs(t, seen(p, keys), engine.ErrClosed)
	p.Close()
	<-p.Done()
	_, err = n.ns.Pin(t.Context(), keys, 0)
	require.ErrorIs(t, err, engine.ErrClosed)
}

// unproving is a backend whose memory proves no end while it is told to.
type unproving struct {
	driver.Backend
	silent atomic.Bool
}

type unprovingMemory struct {
	driver.Memory
	b *unproving
}

func (b *unproving) Register(s driver.Segment) (driver.Memory, error) {
	m, err := b.Backend.Register(s)
	return &unprovingMemory{m, b}, err
}

func (m *unprovingMemory) Revoke(ctx context.Context) error {
	if m.b.silent.Load() {
		return driver.ErrUnproven
	}
	return m.Memory.Revoke(ctx)
}

// TestHoldAndClose: while a transfer from or to what is held has no proof of its end, Close fails,
// and the memory stays where it is.
func TestHoldAndClose(t *testing.T) {
	m, err := mem.New(mem.Config{})
	require.NoError(t, err)
	b := &unproving{Backend: m}
	n := openOver(t, memoryFile(t), 16, engine.Config{Backends: []driver.Backend{b}}, nil)
	draft, err := n.ns.Draft(2, blockBytes)
	require.NoError(t, err)
	release, err := draft.Hold()
	require.NoError(t, err)
	b.silent.Store(true)
	require.ErrorIs(t, n.Cache.Close(), engine.ErrUnproven)
	require.ErrorIs(t, n.Cache.Close(), engine.ErrUnproven)
	draft.blocks[1][0] = 1 // what comes late lands here
	_, err = draft.Place()
	require.ErrorIs(t, err, engine.ErrClosed)
	draft.Close()
	release()
	<-draft.Done()
	b.silent.Store(false)
	require.NoError(t, n.Cache.Close())
}

// TestDraft: one that there is no room for leaves nothing behind, and nothing else takes the place
// of one that is open.
func TestDraft(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, func(c *Config) { c.Policy, c.HoldMax = LRU, 192<<10 })
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 192 << 10}))
	_, err := n.ns.Draft(16*3+1, 1)
	require.ErrorIs(t, err, engine.ErrBounds)
	n.put(t, ids(0, 4))
	p, err := n.ns.Pin(t.Context(), ids(0, 1), 0)
	require.NoError(t, err)
	small, err := n.ns.Draft(1, 1) // has one of the two extents cut in its way
	require.NoError(t, err)
	for range 3 {
		_, err = n.ns.Draft(14, blockBytes)
		require.ErrorIs(t, err, ErrNoRoom)
		require.ErrorContains(t, err, "there is room for 7")
		require.EqualValues(t, blockBytes+granule, n.Stats().Held)
	}
	small.Close()
	d, err := n.ns.Draft(4, blockBytes)
	require.NoError(t, err)
	for _, block := range d.blocks {
		copy(block, "draft")
	}
	n.flood(t, 100)
	for _, block := range d.blocks {
		require.Equal(t, "draft", string(block[:5]))
	}
	require.NoError(t, seen(p, ids(0, 1)))
	d.Close()
	d.Close()
	p.Close()
	<-d.Done()
	require.Zero(t, n.Stats().Held)
	require.ErrorIs(t, seen(d, nil), ErrPinEnded)
	n.flood(t, 500)
	n.check(t)
}
