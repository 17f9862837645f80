// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testpoint"
)

// fill fills a slot of the program's memory with a version, in each of its words.
func (n *node) fill(slot int, version uint64) {
	p := n.mem[slot*blockBytes:][:blockBytes]
	for k := 0; k < len(p); k += 8 {
		binary.NativeEndian.PutUint64(p[k:], version)
	}
}

// replace replaces the block of a key by a version, from a slot, and waits for the disk, too.
func (n *node) replace(tb testing.TB, key Key, slot int, version, length uint64) {
	tb.Helper()
	n.fill(slot, version)
	at := n.at(slot, 1)
	at.Run = length
	op := n.ns.Replace(tb.Context(), []Key{key}, at)
	require.NoError(tb, op.Wait(tb.Context()))
	require.Equal(tb, []Outcome{Done}, op.Outcomes())
	<-op.Durable()
}

// version loads a block of fill to a slot, all of one version; 0: there is none.
func (n *node) version(tb testing.TB, key Key, slot int, length uint64) uint64 {
	tb.Helper()
	at := n.at(slot, 1)
	at.Run = length
	op := n.ns.Load(tb.Context(), []Key{key}, at)
	require.NoError(tb, op.Wait(tb.Context()))
	if op.Outcomes()[0] == Missing {
		return 0
	}
	require.Equal(tb, []Outcome{Done}, op.Outcomes())
	p := n.mem[slot*blockBytes:][:length]
	require.Equal(tb, bytes.Repeat(p[:8], int(length/8)), p, "parts of two versions")
	return binary.NativeEndian.Uint64(p)
}

// TestReplace: a block takes the place of the one that its key has, in all tiers and also of
// another length, while a Load or a Pin of that one goes on with it.
func TestReplace(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 64))
	key := ids(1, 1)[0]
	n.replace(t, key, 0, 1, blockBytes) // of a key that there is not
	require.Equal(t, uint64(1), n.version(t, key, 128, blockBytes))

	pin, err := n.ns.Pin(t.Context(), []Key{key}, 0)
	require.NoError(t, err)
	events := n.Events(t.Context())
	for version := uint64(2); version < 5; version++ {
		n.replace(t, key, 0, version, 4096)
	}
	for _, want := range []EventKind{Removed, Stored, Removed, Stored, Removed, Stored} {
		e := <-events
		for e.Kind != Removed && e.Kind != Stored {
			e = <-events
		}
		require.Equal(t, want, e.Kind)
	}
	require.NoError(t, pin.View(func(blocks [][]byte) error {
		require.Equal(t, uint64(1), binary.NativeEndian.Uint64(blocks[0]))
		return nil
	}))
	require.Equal(t, uint64(4), n.version(t, key, 128, 4096))
	require.Equal(t, []Outcome{Conflict}, n.put(t, []Key{key}))
	pin.Close()
	<-pin.Done()
	n.drained(t)

	n.put(t, ids(100, 40)) // which leave it on its disk alone
	require.Equal(t, OnDisk, n.ns.Match([]Key{key}).Blocks[0])
	n.replace(t, key, 0, 5, blockBytes)
	n.drained(t)
	for range 2 { // with the memory, and after a boot
		n.close(t)
		n = openNode(t, path, 16, withDisk(file, 64))
		require.Equal(t, uint64(5), n.version(t, key, 128, blockBytes))
		n.drained(t)
		require.NoError(t, os.Remove(path))
	}

	// Twice in one call: one of the two; no room: the old one.
	n.fill(0, 6)
	n.fill(1, 7)
	op := n.ns.Replace(t.Context(), []Key{key, key}, n.at(0, 2))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 2), op.Outcomes())
	require.Contains(t, []uint64{6, 7}, n.version(t, key, 128, blockBytes))
	require.NoError(t, n.ns.Set(NamespaceOptions{Quota: [2]uint64{blockBytes, 0}}))
	pin, err = n.ns.Pin(t.Context(), []Key{key}, 0)
	require.NoError(t, err)
	op = n.ns.Replace(t.Context(), []Key{key}, n.at(0, 1))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, []Outcome{NoRoom}, op.Outcomes())
	require.Contains(t, []uint64{6, 7}, n.version(t, key, 128, blockBytes))
	pin.Close()
	<-pin.Done()
	n.drained(t)
}

// TestReplaceBesideLoad: a Load that has found a block and not read it yet ends with that one or
// with the one that takes its place, never with none.
func TestReplaceBesideLoad(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	key := ids(1, 1)[0]
	n.replace(t, key, 0, 1, blockBytes)
	n.drained(t)
	n.put(t, ids(100, 40)) // which leave it on its disk alone
	n.drained(t)
	require.Equal(t, OnDisk, n.ns.Match([]Key{key}).Blocks[0])
	for version, point := range []string{"cache: found", "cache: pinned"} {
		stands := testpoint.Stand(t, point)[0]
		op := n.ns.Load(t.Context(), []Key{key}, n.at(128, 1))
		<-stands.Came
		old := find(n, key)
		n.replace(t, key, 0, uint64(version)+2, blockBytes)
		if point == "cache: pinned" { // as if what lay on the disk was another's as it was read
			clear(n.memory.bytesOf(n.index.entry(old).slot, blockBytes))
		}
		stands.GoOn()
		require.NoError(t, op.Wait(t.Context()))
		require.Equal(t, []Outcome{Done}, op.Outcomes())
		require.Equal(t, uint64(version)+2, binary.NativeEndian.Uint64(n.mem[128*blockBytes:]))
	}
	n.drained(t)
	require.NoError(t, n.ns.Remove([]Key{key}))
	require.Zero(t, n.version(t, key, 128, blockBytes))
}

// TestReplaceBesidePin: a Pin or a Prefetch that has found a block and not read it yet ends with
// the one that takes its place, also of another length, within the budget of Pins.
func TestReplaceBesidePin(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 1024)(c)
		c.Policy = LRU
	})
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 2 * blockBytes}))
	key, version := ids(1, 1)[0], uint64(1)
	for _, point := range []string{"cache: sized", "cache: held"} {
		for _, length := range []uint64{blockBytes, 4096, 2 * blockBytes} {
			for _, pins := range []bool{true, false} {
				n.replace(t, key, 0, version, blockBytes)
				n.flood(t, 1000*version) // so that it is on its disk alone
				n.drained(t)
				require.Equal(t, OnDisk, n.ns.Match([]Key{key}).Blocks[0])
				version++
				stands := testpoint.Stand(t, point)[0]
				var pin *Pin
				ended := make(chan error, 1)
				go func() {
					if pins {
						var err error
						pin, err = n.ns.Pin(t.Context(), []Key{key}, 0)
						ended <- err
						return
					}
					op := n.ns.Prefetch(t.Context(), []Key{key})
					err := op.Wait(t.Context())
					if o := op.Outcomes()[0]; o != Done {
						err = fmt.Errorf("prefetch: %v, %w", o, err)
					}
					ended <- err
				}()
				<-stands.Came
				n.fill(0, version)
				n.fill(1, version)
				at := n.at(0, 1)
				at.Run = length
				op := n.ns.Replace(t.Context(), []Key{key}, at)
				require.NoError(t, op.Wait(t.Context()))
				require.Equal(t, []Outcome{Done}, op.Outcomes())
				stands.GoOn()
				require.NoError(t, <-ended)
				testpoint.Set(nil)
				if !pins {
					continue
				}
				require.Equal(t, []Outcome{Done}, pin.Outcomes())
				require.EqualValues(t, length, n.Stats().Held)
				require.NoError(t, pin.View(func(blocks [][]byte) error {
					require.Len(t, blocks[0], int(length))
					require.Equal(t, version, binary.NativeEndian.Uint64(blocks[0]))
					return nil
				}))
				pin.Close()
				<-pin.Done()
				require.Zero(t, n.Stats().Held)
			}
		}
	}
	n.drained(t)
}

// TestPrefetchBesideReplace: blocks that are longer since a Prefetch has looked are not brought
// beyond a quarter of the memory.
func TestPrefetchBesideReplace(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 1024)(c)
		c.Policy = LRU
	})
	keys := ids(1, 8)
	n.put(t, keys)
	n.flood(t, 1000) // so that they are on their disk alone
	n.drained(t)
	stand := testpoint.Stand(t, "cache: sized")[0]
	op := n.ns.Prefetch(t.Context(), keys)
	<-stand.Came
	for _, key := range keys[:2] {
		n.replace(t, key, 0, 2, 2*blockBytes)
	}
	n.replace(t, keys[7], 0, 2, 4096)
	stand.GoOn()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, []Outcome{NoRoom, NoRoom, Done, Done, Done, Done, Done, Done}, op.Outcomes())
	n.drained(t)
}

// find returns the entry of a key.
func find(n *node, key Key) (entry uint32) {
	n.index.each(n.ns.id, []Key{key}, false, func(_ *shard, _ int, i uint32, _ uint64) {
		entry = i
	})
	return entry
}

// TestReplaceOfWhatComes: a Replace that commits while a Store of the key runs wins; a Remove of
// the key does not see a Replace that has not committed.
func TestReplaceOfWhatComes(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	key := ids(1, 1)[0]
	stands := testpoint.Stand(t, "cache: landed")[0]
	n.fill(0, 1)
	op := n.ns.Store(t.Context(), []Key{key}, n.at(0, 1))
	<-stands.Came
	n.replace(t, key, 1, 2, blockBytes)
	stands.GoOn()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, []Outcome{Done}, op.Outcomes())
	require.Equal(t, uint64(2), n.version(t, key, 128, blockBytes))

	stands = testpoint.Stand(t, "cache: landed")[0]
	n.fill(0, 3)
	op = n.ns.Replace(t.Context(), []Key{key}, n.at(0, 1))
	<-stands.Came
	require.Equal(t, uint64(2), n.version(t, key, 128, blockBytes))
	require.NoError(t, n.ns.Remove([]Key{key}))
	require.Zero(t, n.version(t, key, 128, blockBytes))
	stands.GoOn()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, uint64(3), n.version(t, key, 128, blockBytes))
	n.drained(t)
}

// TestReplacesAtOnce: several replace a key again and again, while others
// load it: they find it at each moment, all of one version, and none goes back.
func TestReplacesAtOnce(t *testing.T) {
	const writers, rounds = 3, 60
	n := openNode(t, memoryFile(t), 24, withDisk(filepath.Join(t.TempDir(), "disk"), 32))
	key := ids(1, 1)[0]
	n.replace(t, key, 0, 1, blockBytes)
	var all, readers sync.WaitGroup
	var told [writers]atomic.Uint64 // a version that is replaced by no earlier one of the writer
	var over atomic.Bool
	for w := range writers {
		all.Go(func() {
			for k := range uint64(rounds) {
				version := (k+2)<<8 | uint64(w)
				n.replace(t, key, w, version, blockBytes)
				told[w].Store(version)
			}
		})
	}
	for r := range 2 {
		readers.Go(func() {
			var seen [writers]uint64
			for !over.Load() {
				version := n.version(t, key, 128+r, blockBytes)
				require.NotZero(t, version)
				if version == 1 {
					continue
				}
				w := version & 0xff
				require.GreaterOrEqual(t, version, seen[w])
				seen[w] = version
			}
		})
	}
	all.Wait()
	over.Store(true)
	readers.Wait()
	last := n.version(t, key, 128, blockBytes)
	require.Equal(t, told[last&0xff].Load(), last)
	n.drained(t)
}

// replaceVariable has the child of the tests of kills replace one block for ever.
const replaceVariable = "SLUICE_TEST_REPLACE"

func replaceForEver(tb testing.TB, n *node, first uint64) {
	key := ids(1, 1)[0]
	for version := first; ; version++ {
		n.replace(tb, key, 0, version, blockBytes)
		fmt.Println("stored", version)
	}
}

// TestKillReplace: a process that is killed at any step of a Replace leaves the block that was
// there, or the new one, in memory; behind a boot nothing older than the last that was told of.
func TestKillReplace(t *testing.T) {
	for _, point := range append([]string{"cache: replaces"}, killPoints...) {
		for _, booted := range []bool{false, true} {
			t.Run(fmt.Sprint(point, " booted ", booted), func(t *testing.T) {
				path := memoryFile(t)
				child, out := startChild(t, path, "ring", point, 7, 1, replaceVariable+"=")
				last, _ := follow(t, child, out, 0, 1)
				require.NotZero(t, last)
				if booted {
					require.NoError(t, os.Remove(path))
				}
				n := openBy(t, path, killBlocks, killWays["ring"],
					withDisk(path+".disk", killOnDisk))
				want := []uint64{last, last + 1}
				if booted {
					want = append(want, 0)
				}
				require.Contains(t, want, n.version(t, ids(1, 1)[0], 128, blockBytes))
				n.replace(t, ids(1, 1)[0], 0, 1000, blockBytes)
				require.Equal(t, uint64(1000), n.version(t, ids(1, 1)[0], 128, blockBytes))
				n.drained(t)
			})
		}
	}
}
