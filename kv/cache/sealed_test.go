// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/seal"
)

// sealed has the disk of a config be sealed by keys of some numbers, which lie beside it. It has
// room for as many blocks as before.
func sealed(tb testing.TB, path string, numbers ...int) func(*Config) {
	tb.Helper()
	text, path := "", path+fmt.Sprint(".keys", numbers)
	for _, n := range numbers {
		text += fmt.Sprintf("%064x\n", n)
	}
	require.NoError(tb, os.WriteFile(path, []byte(text), 0o600))
	keys, err := seal.ReadKeys(path)
	require.NoError(tb, err)
	return func(c *Config) {
		c.Seal = keys
		d := &c.Disks[0]
		d.Extent, d.Bytes = 16*blockBytes, (d.Bytes/(6*blockBytes)+1)*16*blockBytes
	}
}

// sealedNode is a node with a sealed disk of 64 blocks and more.
func sealedNode(t *testing.T, path, file string, keys ...int) *node {
	return openNode(t, path, 16, func(c *Config) {
		withDisk(file, 64)(c)
		sealed(t, file, keys...)(c)
	})
}

// TestSealedDisk: a disk says nothing of what was stored, and gives it back after a boot, also by
// keys of which an older one has sealed it.
func TestSealedDisk(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := sealedNode(t, path, file, 1)
	for from := uint64(0); from < 48; from += 8 {
		require.Equal(t, all(Done, 8), n.put(t, ids(from, 8)))
	}
	whole := n.at(0, 1) // as long as a block may be
	whole.Run = n.cfg.Memory.Extent
	op := n.ns.Store(t.Context(), ids(100, 1), whole)
	require.NoError(t, op.Wait(t.Context()))
	<-op.Durable()
	require.NotZero(t, n.ns.Match(ids(100, 1)).Blocks[0]&OnDisk)
	n.drained(t)
	require.Equal(t, all(Done, 12), n.get(t, ids(0, 12)))
	require.Equal(t, all(Done, 12), n.get(t, ids(36, 12)))
	digest := n.ns.Digest()
	n.close(t)

	text, err := os.ReadFile(file)
	require.NoError(t, err)
	block := make([]byte, blockBytes)
	for _, key := range ids(0, 48) {
		content(key, block)
		require.False(t, bytes.Contains(text, key[:]), "a key")
		require.False(t, bytes.Contains(text, block[:16]), "the begin of a block")
		require.False(t, bytes.Contains(text, block[blockBytes-16:]), "the end of a block")
	}
	require.False(t, bytes.Contains(text, digest[:]), "the namespace")

	for _, keys := range [][]int{{1}, {2, 1}, {3, 2, 1}} {
		require.NoError(t, os.Remove(path))
		n = sealedNode(t, path, file, keys...)
		require.Empty(t, n.Stats().Disks[0].Fresh)
		require.Equal(t, 48, n.ns.Match(ids(0, 48)).Prefix)
		for from := uint64(0); from < 48; from += 12 {
			require.Equal(t, all(Done, 12), n.get(t, ids(from, 12)))
		}
		require.Equal(t, all(Done, 1), n.put(t, ids(200+uint64(keys[0]), 1)))
		n.drained(t)
		n.close(t)
	}

	// One key has left: what it has sealed is not found, and what the others have is.
	require.NoError(t, os.Remove(path))
	n = sealedNode(t, path, file, 3, 2)
	require.Contains(t, n.Stats().Disks[0].Error, "not in")
	require.Equal(t, []Outcome{Missing, Done, Done}, n.get(t, ids(201, 3)))
	require.Zero(t, n.ns.Match(ids(0, 48)).Prefix)
	n.drained(t)
	n.close(t)

	// No key of the file fits: it stays as it is. Without keys it is made anew.
	require.NoError(t, os.Remove(path))
	others := Config{Disks: []DiskConfig{{}}}
	sealed(t, file, 9)(&others)
	withKeys := Config{Memory: n.cfg.Memory, Disks: n.cfg.Disks, Seal: others.Seal}
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "other", Backends: []driver.Backend{b}})
	require.NoError(t, err)
	withKeys.Engine = e
	_, err = Open(t.Context(), withKeys)
	require.NoError(t, e.Close())
	require.ErrorIs(t, err, engine.ErrCorrupt)
	require.ErrorContains(t, err, "name the key file")
	n = sealedNode(t, path, file, 3)
	require.Equal(t, all(Done, 1), n.get(t, ids(203, 1)))
	n.close(t)
	n = openNode(t, path, 16, withDisk(file, 64))
	require.Contains(t, n.Stats().Disks[0].Fresh, "no keys are given")
	n.close(t)
	n = sealedNode(t, path, file, 3)
	require.Contains(t, n.Stats().Disks[0].Fresh, "keys are given")
}

// TestSealedDiskThatLies: what was moved on the disk, changed, or put back from before, is a miss.
func TestSealedDiskThatLies(t *testing.T) {
	const first, second = 3, 5
	type parts struct {
		block, before, other  []byte // of the first, of the first before, of the second
		record, anotherRecord []byte
	}
	for name, c := range map[string]struct {
		lie  func(p parts)
		want Outcome // of the first
	}{
		"another block":          {func(p parts) { copy(p.block, p.other) }, Damaged},
		"the block of before":    {func(p parts) { copy(p.block, p.before) }, Damaged},
		"a bit of the block":     {func(p parts) { p.block[700] ^= 1 }, Damaged},
		"a bit of the tag":       {func(p parts) { p.block[blockBytes] ^= 1 }, Damaged},
		"the record of another":  {func(p parts) { copy(p.record, p.anotherRecord) }, Missing},
		"a bit of the record":    {func(p parts) { p.record[40] ^= 1 }, Missing},
		"nothing, to compare it": {func(parts) {}, Done},
	} {
		t.Run(name, func(t *testing.T) {
			path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
			n := sealedNode(t, path, file, 1)
			d, number := n.disks[0], uint32(0)
			block := func(text []byte, id uint64) []byte {
				number = n.recordOf(id)
				return text[d.dataOff()+uint64(d.placeOf(number))*granule:][:d.run(blockBytes)]
			}
			read := func() []byte {
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				return text
			}
			keys := ids(first, 1)
			n.replace(t, keys[0], 20, 7, blockBytes)
			n.drained(t)
			p := parts{before: block(read(), first)}
			require.NoError(t, n.ns.Remove(keys))
			require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
			n.drained(t)
			text := read()
			p.other = block(text, second)
			p.anotherRecord = text[d.recordAt(number):][:sealedRecord]
			p.block = block(text, first)
			p.record = text[d.recordAt(number):][:sealedRecord]
			c.lie(p)
			binary.LittleEndian.PutUint32(p.record[sealedRecord-4:], d.sumOf(p.record, number))
			n.close(t)
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.WriteFile(file, text, 0o600))
			n = sealedNode(t, path, file, 1)
			require.Equal(t, []Outcome{c.want}, n.get(t, keys))
			require.Equal(t, c.want == Done, n.ns.Match(keys).Prefix == 1)
			require.Equal(t, all(Done, 1), n.get(t, ids(0, 1)))
			n.drained(t)
		})
	}
}

// recordOf is the number of the record of a block.
func (n *node) recordOf(id uint64) (record uint32) {
	n.index.each(n.ns.id, ids(id, 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
		record = n.index.entry(i).record
	})
	return record
}

// TestSealedKeyThatComesBack: what a key has sealed that had left the file meanwhile is not found
// once the key is there again, as it may have been removed or replaced.
func TestSealedKeyThatComesBack(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	open := func(keys ...int) *node {
		if _, err := os.Stat(path); err == nil {
			require.NoError(t, os.Remove(path))
		}
		return sealedNode(t, path, file, keys...)
	}
	n := open(1)
	require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
	n.close(t)
	n = open(2, 1)
	require.Equal(t, 8, n.ns.Match(ids(0, 8)).Prefix)
	require.Equal(t, all(Done, 1), n.put(t, ids(100, 1)))
	n.close(t)
	n = open(2)
	require.Equal(t, all(Missing, 8), n.get(t, ids(0, 8)))
	require.NoError(t, n.ns.Remove(ids(0, 1)))
	n.replace(t, ids(1, 1)[0], 20, 7, blockBytes)
	n.close(t)
	n = open(2, 1)
	require.Equal(t, []Outcome{Missing}, n.get(t, ids(0, 1)))
	require.Equal(t, uint64(7), n.version(t, ids(1, 1)[0], 20, blockBytes))
	require.Equal(t, all(Missing, 6), n.get(t, ids(2, 6)))
	require.Equal(t, all(Done, 1), n.get(t, ids(100, 1)))
}

// TestStages: a stage that was not registered is, for who needs it next; none is longer than a
// transfer, however many small blocks wait; and those that are lost are few.
func TestStages(t *testing.T) {
	const small, many = 512, 4000
	n := openNode(t, memoryFile(t), many/2, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), many+100)(c)
		sealed(t, c.Disks[0].Path, 1)(c)
	})
	d := n.disks[0]
	var taken []*engine.Region
	for k := range stagesMax {
		r, err := n.engine.RegisterPrivate(fmt.Sprintf("cache disk %x, sealed %d", d.id[:8], k),
			driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: n.mem[:4096]})
		require.NoError(t, err)
		taken = append(taken, r)
	}
	require.Equal(t, all(Done, 1), n.put(t, ids(0, 1)))
	require.Zero(t, n.ns.Match(ids(0, 1)).Blocks[0]&OnDisk)
	for _, r := range taken {
		require.NoError(t, r.Close())
	}
	for k := range uint64(stagesMax) { // each has its turn
		require.Equal(t, all(Done, 1), n.put(t, ids(1+k, 1)))
		require.NotZero(t, n.ns.Match(ids(1+k, 1)).Blocks[0]&OnDisk)
	}

	standing := testpoint.Stand(t, "cache: on disk")[0]
	var ops []*Op
	store := func(from, count uint64) {
		at := n.at(0, int(count))
		at.Run, at.Stride = small, small
		op := n.ns.Store(t.Context(), ids(from, count), at)
		require.NoError(t, op.Wait(t.Context()))
		ops = append(ops, op)
	}
	store(100, 1)
	<-standing.Came
	for k := range uint64(2) { // one in the channel, one before it
		store(101+k, 1)
		require.Eventually(t, func() bool { return len(n.writes) == 0 && len(d.jobs) == 1 },
			time.Minute, time.Millisecond)
	}
	store(200, many)
	standing.GoOn()
	for _, op := range ops {
		<-op.Durable()
	}
	require.Zero(t, n.Stats().Unwritten)
	for range stagesMax {
		s := <-d.stages
		if s.memory != nil {
			require.LessOrEqual(t, len(s.memory.Bytes()), batchBytes)
		}
		d.stages <- s
	}

	for range lostMax {
		s, _, err := n.takeStage(t.Context(), d, 1, small)
		require.NoError(t, err)
		d.giveStage(s, false)
	}
	_, _, err := n.takeStage(t.Context(), d, 1, small)
	require.ErrorIs(t, err, engine.ErrBusy)
	before := d.health // as of a disk that does not answer
	require.Equal(t, all(Done, 1), n.put(t, ids(9000, 1)))
	require.Zero(t, n.ns.Match(ids(9000, 1)).Blocks[0]&OnDisk)
	require.Equal(t, before, d.health)
}
