// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// withDisk adds a disk of so many blocks.
func withDisk(path string, blocks int) func(*Config) {
	return func(c *Config) {
		c.Disks = []DiskConfig{{Path: path, Bytes: uint64(blocks) * blockBytes,
			Extent: 8 * blockBytes, Blocks: uint64(blocks) + 8,
			SlowAfter: time.Hour}} // also on a machine that stands still
		c.Blocks = uint64(4 * blocks)
	}
}

// costOf is what a block takes of the budget of a disk that is not sealed.
func costOf(bytes uint64) uint64 {
	return (&disk{header: header{shape: shape{each: recordBytes}}}).costOf(bytes)
}

func ids(from, n uint64) []Key {
	list := make([]uint64, n)
	for k := range list {
		list[k] = from + uint64(k)
	}
	return keysOf(list...)
}

// TestDisk stores more than the memory has room for: what left it comes from the disk, also after
// the memory file is gone, as a boot of the host leaves it.
func TestDisk(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 64))
	for from := uint64(0); from < 48; from += 8 {
		require.Equal(t, all(Done, 8), n.put(t, ids(from, 8)))
	}
	n.drained(t)
	require.Equal(t, 48, n.ns.Match(ids(0, 48)).Prefix)
	require.Contains(t, n.ns.Match(ids(0, 48)).Blocks, OnDisk)
	require.Equal(t, all(Done, 12), n.get(t, ids(0, 12)))
	require.Equal(t, all(Done, 12), n.get(t, ids(36, 12)))
	n.drained(t)
	for range 2 {
		n.close(t)
		require.NoError(t, os.Remove(path))
		n = openNode(t, path, 16, withDisk(file, 64))
		n.drained(t)
		require.Equal(t, 48, n.ns.Match(ids(0, 48)).Prefix)
		for from := uint64(0); from < 48; from += 12 {
			require.Equal(t, all(Done, 12), n.get(t, ids(from, 12)))
		}
	}
	n.ns.Remove(ids(0, 48))
	n.drained(t)
	n.close(t)
	n = openNode(t, path, 16, withDisk(file, 64))
	require.Equal(t, all(Missing, 48), n.get(t, ids(0, 48)))
	n.drained(t)
}

// TestDiskIsBounded: a disk that is full lets the oldest go.
func TestDiskIsBounded(t *testing.T) {
	n := openNode(t, memoryFile(t), 8, withDisk(filepath.Join(t.TempDir(), "disk"), 24))
	for from := uint64(0); from < 160; from += 4 {
		require.Equal(t, all(Done, 4), n.put(t, ids(from, 4)))
		n.drained(t)
	}
	found := 0
	for _, f := range n.ns.Match(ids(0, 160)).Blocks {
		if f != Nowhere {
			found++
		}
	}
	require.GreaterOrEqual(t, found, 20)
	require.LessOrEqual(t, found, 32)
}

// TestDamagedDisk: bytes that the disk gives and nobody stored are a miss, and forgotten.
func TestDamagedDisk(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 64))
	require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
	data := n.disks[0].dataOff()
	n.close(t)
	require.NoError(t, os.Remove(path))
	p, err := os.ReadFile(file)
	require.NoError(t, err)
	p[data+2*blockBytes+77] ^= 4
	require.NoError(t, os.WriteFile(file, p, 0o600))
	n = openNode(t, path, 16, withDisk(file, 64))
	outcomes := n.get(t, ids(0, 8))
	damaged := 0
	for k, o := range outcomes {
		if o == Damaged {
			damaged++
			require.Equal(t, Nowhere, n.ns.Match(ids(uint64(k), 1)).Blocks[0])
		} else {
			require.Equal(t, Done, o)
		}
	}
	require.Equal(t, 1, damaged)
	n.drained(t)
}

// TestVerifyFirstBehindADisk: what was verified in memory, and came back from a disk, is verified
// again.
func TestVerifyFirstBehindADisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	n := openNode(t, memoryFile(t), 16, func(c *Config) {
		withDisk(file, 64)(c)
		c.VerifyFirst = true
	})
	keys := ids(0, 2)
	require.Equal(t, all(Done, 2), n.put(t, keys))
	require.NoError(t, n.Drain(t.Context()))
	require.Equal(t, all(Done, 2), n.get(t, keys))
	_, err := n.ns.Hint(keys, Hint{Kind: HintDemote})
	require.NoError(t, err)
	require.Equal(t, []Found{OnDisk, OnDisk}, n.ns.Match(keys).Blocks)
	p, err := os.ReadFile(file)
	require.NoError(t, err)
	n.index.each(n.ns.id, keys[:1], false, func(_ *shard, _ int, i uint32, _ uint64) {
		p[n.disks[0].dataOff()+uint64(n.spotOf(i, Disk).place)*granule+77] ^= 4
	})
	require.NoError(t, os.WriteFile(file, p, 0o600))
	require.Equal(t, []Outcome{Damaged, Done}, n.get(t, keys))
}

// spend has so many bytes of a budget written, if it affords them.
func spend(b *budget, now time.Time, bytes uint64, again bool) bool {
	if !b.affords(now, bytes, again) {
		return false
	}
	b.left -= float64(bytes)
	return true
}

// TestBudget: a day's bytes are never passed, over half of what may go at once only what was used
// again is written, and a restart gives nothing back.
func TestBudget(t *testing.T) {
	now := time.Unix(1e9, 0)
	b := budget{day: 8000, left: 1000, at: now}
	spend := func(bytes uint64, again bool) bool { return spend(&b, now, bytes, again) }
	require.True(t, spend(500, false))
	require.False(t, spend(1, false), "half is used up")
	require.True(t, spend(500, true))
	require.False(t, spend(1, true))
	total := 1000.0
	for range 24 * 60 {
		now = now.Add(time.Minute)
		for spend(1, true) {
			total++
		}
	}
	require.InDelta(t, 8000, total, 2)
	b.refill(now.Add(1000 * time.Hour))
	require.Equal(t, 1000.0, b.left)
	b.refill(now.Add(-1000 * time.Hour))
	require.Equal(t, 1000.0, b.left)

	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	bounded := func(c *Config) {
		withDisk(file, 64)(c)
		c.Disks[0].BytesADay = 8 * 5 * costOf(blockBytes) // five at once
	}
	n := openNode(t, path, 16, bounded)
	require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
	require.EqualValues(t, 3, n.stats.swappedOut.Load())
	require.EqualValues(t, 5, n.Stats().Unwritten)
	s := n.Stats().Disks[0]
	require.Equal(t, s.Day/8, 5*uint64(costOf(blockBytes)))
	require.Less(t, s.Left, s.Day/8)
	n.close(t)
	n = openNode(t, path, 16, bounded)
	require.Equal(t, all(Done, 8), n.get(t, ids(0, 8))) // each was used again now
	require.NoError(t, n.Drain(t.Context()))
	n.close(t)
	require.EqualValues(t, 2, n.stats.swappedOut.Load())
}

// TestGrownDisk: a disk that gets more bytes keeps its blocks, also where the filesystem has not so
// many; one that gets fewer is made anew.
func TestGrownDisk(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	sized := func(blocks uint64) func(*Config) {
		return func(c *Config) {
			withDisk(file, 32)(c)
			c.Disks[0].Bytes, c.Disks[0].Blocks = blocks*blockBytes, 0
		}
	}
	n := openNode(t, path, 16, sized(32))
	require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
	n.drained(t)
	cfg := n.cfg
	n.close(t)
	require.NoError(t, os.Remove(path))

	cfg.Engine, cfg.Disks[0].Bytes = memoryOnlyEngine(t), 8<<40
	_, err := Open(t.Context(), cfg)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.NoFileExists(t, path, "what it has made it removes")

	n = openNode(t, path, 16, sized(128))
	require.Empty(t, n.Stats().Disks[0].Fresh)
	require.EqualValues(t, 128*blockBytes, n.Stats().Disks[0].Room)
	require.Equal(t, all(Done, 8), n.get(t, ids(0, 8)))
	for from := uint64(100); from < 164; from += 8 {
		n.put(t, ids(from, 8))
		n.drained(t)
	}
	n.check(t)
	onDisk := n.Stats().Disks[0].Blocks
	require.Greater(t, onDisk, 8)
	n.close(t)
	require.NoError(t, os.Remove(path))
	n = openNode(t, path, 16, sized(128))
	require.Equal(t, onDisk, n.Stats().Disks[0].Blocks)
	require.NotContains(t, n.get(t, ids(100, 64)), Damaged)
	n.close(t)

	n = openNode(t, path, 16, sized(64))
	require.Contains(t, n.Stats().Disks[0].Fresh, "its shape stays as it was: bytes, ")
}

// TestFailedOpenLeavesNothing: where Open fails it removes the files that it has made, and no
// others.
func TestFailedOpenLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path, file := filepath.Join(dir, "memory"), filepath.Join(dir, "disk")
	n := openNode(t, filepath.Join(dir, "other"), 16, nil)
	for name, change := range map[string]func(*Config){
		"disk":   func(c *Config) { c.Disks[0].Bytes = 8 << 40 },
		"memory": func(c *Config) { c.Memory.Bytes = 8 << 40 },
		"engine": func(c *Config) { c.Engine = memoryOnlyEngine(t) },
	} {
		for _, there := range []bool{false, true} {
			if there {
				require.NoError(t, os.WriteFile(path, nil, 0o600))
				require.NoError(t, os.WriteFile(file, nil, 0o600))
			}
			cfg := n.cfg
			cfg.Memory.Path = path
			withDisk(file, 32)(&cfg)
			change(&cfg)
			_, err := Open(t.Context(), cfg)
			require.Error(t, err, name)
			for _, f := range []string{path, file} {
				_, err := os.Stat(f)
				require.Equal(t, there, err == nil, "%s: %s", name, f)
				_ = os.Remove(f)
			}
		}
	}
}

// TestFileRemovedMeanwhile: a file that another process removes while it is waited for is not used.
func TestFileRemovedMeanwhile(t *testing.T) {
	path := memoryFile(t)
	_, _, err := openOwn(t.Context(), path, func(*os.File) int {
		require.NoError(t, os.Remove(path))
		return 0
	})
	require.ErrorContains(t, err, "was removed meanwhile: try again")
	require.NoFileExists(t, path)
}

// TestFailedOpenOfWhatOthersMade: a file that another process has filled, or put in the place of
// ours, is not removed by an Open that fails.
func TestFailedOpenOfWhatOthersMade(t *testing.T) {
	path := memoryFile(t)
	f, made, err := openOwn(t.Context(), path, func(*os.File) int {
		require.NoError(t, os.WriteFile(path, []byte("blocks"), 0o600)) // who had it before us
		return 0
	})
	require.NoError(t, err)
	require.False(t, made)
	require.NoError(t, closeOwn(f, made))

	path = memoryFile(t)
	f, made, err = openOwn(t.Context(), path, func(*os.File) int { return 0 })
	require.NoError(t, err)
	require.True(t, made)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, []byte("blocks"), 0o600))
	require.NoError(t, closeOwn(f, made))
	require.FileExists(t, path)
}

// TestFailedOpenKeepsBlocks: files that there is no room to make anew in another shape keep theirs.
func TestFailedOpenKeepsBlocks(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 32))
	require.Equal(t, all(Done, 8), n.put(t, ids(0, 8)))
	n.drained(t)
	cfg := n.cfg
	n.close(t)
	cfg.Engine = memoryOnlyEngine(t)
	for _, change := range []func(c *Config){
		func(c *Config) { c.Memory.Bytes = 8 << 40 },
		func(c *Config) { c.Disks[0].Bytes, c.Disks[0].Blocks = 8<<40, 64 },
	} {
		bad := cfg
		bad.Disks = slices.Clone(cfg.Disks)
		change(&bad)
		_, err := Open(t.Context(), bad)
		require.ErrorIs(t, err, unix.ENOSPC)
	}
	n = openNode(t, path, 16, withDisk(file, 32))
	require.Equal(t, 8, n.Attached().Blocks)
	require.Equal(t, 8, n.Stats().Disks[0].Blocks)
}

// TestRecordsOfOnePlace: after a loss of power two records of a disk may name one place. Of those
// one is taken, and behind Remove no restart finds the other.
func TestRecordsOfOnePlace(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 32))
	require.Equal(t, all(Done, 1), n.put(t, ids(0, 1)))
	n.drained(t)
	d := n.disks[0]
	n.index.each(n.ns.id, ids(0, 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
		e := n.index.entry(i)
		require.NoError(t, d.write(d.free[0], &record{key: ids(1, 1)[0], space: n.ns.Digest(),
			crc: e.crc, size: e.size, place: d.placeOf(e.record)}))
	})
	for _, found := range []int{1, 0} {
		n.close(t)
		require.NoError(t, os.Remove(path))
		n = openNode(t, path, 16, withDisk(file, 32))
		require.Equal(t, found, n.Stats().Disks[0].Blocks)
		require.NoError(t, n.ns.Remove(ids(0, 2)))
	}
}

// memoryOnlyEngine is an engine that has no backend for files.
func memoryOnlyEngine(t *testing.T) *engine.Engine {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "no files", Backends: []driver.Backend{b}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// TestDiskFileMadeAnew: one that a kill has left unfinished is made again, and no way to make a
// file anew gives more to write in a day.
func TestDiskFileMadeAnew(t *testing.T) {
	cfg := DiskConfig{Path: filepath.Join(t.TempDir(), "disk"), Bytes: 1 << 20, Extent: 1 << 20,
		Blocks: 16, BytesADay: 8 << 20}
	var begun []byte
	written := 0
	for start := range 10 {
		cfg.Blocks = uint64(16 + start%2) // another shape
		testpoint.First("cache: disk begun", func() {
			p, err := os.ReadFile(cfg.Path)
			require.NoError(t, err)
			begun = p
		})
		d, err := openDisk(t.Context(), 0, cfg)
		require.NoError(t, err)
		require.Equal(t, start > 0, d.fresh != "")
		for spend(&d.budget, time.Now(), 64<<10, true) {
			written += 64 << 10
		}
		require.NoError(t, d.saveBudget())
		require.NoError(t, d.close(false))
		if start%3 == 2 {
			require.NoError(t, os.WriteFile(cfg.Path, begun, 0o600))
		}
	}
	testpoint.Set(nil)
	require.Greater(t, written, 512<<10)
	require.LessOrEqual(t, written, 1<<20+64<<10, "an eighth, and what comes meanwhile")
}

// TestDiskOfAnotherVersion: Open says so of a file of version 1, whose fields lie elsewhere.
func TestDiskOfAnotherVersion(t *testing.T) {
	cfg := DiskConfig{Path: filepath.Join(t.TempDir(), "disk"), Bytes: 1 << 20, Extent: 1 << 20,
		Blocks: 16}
	p := []byte(diskMagic)
	for _, v := range []uint64{1, cfg.Blocks, cfg.Extent, cfg.Bytes} {
		p = binary.LittleEndian.AppendUint64(p, v)
	}
	require.NoError(t, os.WriteFile(cfg.Path, append(p, make([]byte, 2<<20)...), 0o600))
	d, err := openDisk(t.Context(), 0, cfg)
	require.NoError(t, err)
	require.Contains(t, d.fresh, "it has version 1")
	require.NoError(t, d.close(false))
}

// TestDiskThatFails: after some errors in a row a disk is left alone, which Stats tells with the
// last one; one that works in between begins the count anew.
func TestDiskThatFails(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 32))
	d := n.disks[0]
	for range failuresMax - 1 {
		d.failed(syscall.EIO)
	}
	n.put(t, ids(0, 1)) // a write that works
	for range failuresMax - 1 {
		d.failed(syscall.EIO)
		require.Empty(t, n.Stats().Disks[0].Unused)
	}
	d.failed(syscall.EIO)
	s := n.Stats().Disks[0]
	require.Contains(t, s.Unused, "is tried again in")
	require.Equal(t, "input/output error", s.Error)
	n.put(t, ids(10, 1))
	require.Equal(t, s.Blocks, n.Stats().Disks[0].Blocks)
}

// TestDiskThatIsSilent: a disk that has not answered for a while is asked for nothing until it
// answers; what others have is served, and what is new goes to them.
func TestDiskThatIsSilent(t *testing.T) {
	dir := t.TempDir()
	n := openNode(t, memoryFile(t), 8, func(c *Config) {
		withDisk(filepath.Join(dir, "a"), 64)(c)
		other := c.Disks[0]
		other.Path = filepath.Join(dir, "b")
		c.Disks = append(c.Disks, other)
		c.Policy = LRU
	})
	for from := uint64(0); from < 32; from += 4 { // one half to each
		n.disks[from/16].mu.Lock()
		n.disks[from/16].health.without = time.Now().Add(time.Hour)
		n.disks[from/16].mu.Unlock()
		n.put(t, ids(from, 4))
		n.disks[from/16].mu.Lock()
		n.disks[from/16].health = health{}
		n.disks[from/16].mu.Unlock()
	}
	n.drained(t)
	silent, d := map[bool][]Key{}, n.disks[0]
	n.index.each(n.ns.id, ids(0, 24), false, func(_ *shard, k int, i uint32, _ uint64) {
		if e := n.index.entry(i); e.slot == none {
			on := e.disk == d.number
			silent[on] = append(silent[on], ids(uint64(k), 1)...)
		}
	})
	require.NotEmpty(t, silent[true], "each disk has some")
	require.NotEmpty(t, silent[false], "each disk has some")

	d.begins()
	d.mu.Lock()
	d.health.since = time.Now().Add(-time.Hour)
	d.mu.Unlock()
	before := n.Stats().Disks
	require.Contains(t, before[0].Unused, "has not answered for 1h")
	require.Equal(t, []bool{true, false}, []bool{before[0].Silent, before[1].Silent})
	require.Empty(t, before[1].Unused)
	op := n.ns.Load(t.Context(), silent[true][:1], n.at(128, 1))
	require.ErrorContains(t, op.Wait(t.Context()), "has not answered for 1h")
	require.Equal(t, all(Failed, 1), op.Outcomes())
	require.Equal(t, all(Done, 2), n.get(t, silent[false][:2]))
	n.put(t, ids(100, 8))
	n.drained(t)
	require.Equal(t, before[0].Blocks, n.Stats().Disks[0].Blocks)
	require.Equal(t, before[1].Blocks+8, n.Stats().Disks[1].Blocks)

	d.ends(nil, true)
	after := n.Stats().Disks[0]
	require.Empty(t, after.Unused)
	require.False(t, after.Silent)
	require.Contains(t, after.Error, "did not answer for 1h")
	require.Equal(t, all(Done, 1), n.get(t, silent[true][:1]))
}

// TestDiskBesideOneThatHangs: the writes of a disk wait for none of another.
func TestDiskBesideOneThatHangs(t *testing.T) {
	dir := t.TempDir()
	n := openNode(t, memoryFile(t), 64, func(c *Config) {
		withDisk(filepath.Join(dir, "a"), 64)(c)
		c.Disks[0].SlowAfter = time.Hour
		other := c.Disks[0]
		other.Path = filepath.Join(dir, "b")
		c.Disks = append(c.Disks, other)
	})
	standing := testpoint.Stand(t, "cache: on disk")[0]
	hung := n.ns.Store(t.Context(), ids(0, 1), n.at(0, 1))
	<-standing.Came
	waits := func() int { return len(n.disks[0].jobs) + len(n.disks[1].jobs) }
	id := uint64(1)
	next := func() {
		done := n.Stats().SwappedOut
		require.NoError(t, n.ns.Store(t.Context(), ids(id, 1), n.at(int(id), 1)).Wait(t.Context()))
		for waits() == 0 && n.Stats().SwappedOut == done {
			time.Sleep(time.Millisecond)
		}
		id++
	}
	for waits() == 0 {
		next()
	}
	for range 4 {
		done := n.Stats().SwappedOut
		next()
		for n.Stats().SwappedOut == done {
			time.Sleep(time.Millisecond)
		}
	}
	standing.GoOn()
	<-hung.Durable()
	n.drained(t)
	require.Equal(t, id, n.Stats().SwappedOut)
}

// TestPlanGivesUp: blocks for which a disk has not had time for SlowAfter stay in memory alone, and
// hold up no others.
func TestPlanGivesUp(t *testing.T) {
	n := openNode(t, memoryFile(t), 64, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.Disks[0].SlowAfter = 10 * time.Millisecond
	})
	d := n.disks[0]
	d.recording.Lock() // one job is with the disk's writer then, and one waits for it
	over := make(chan uint64, 32)
	for id := uint64(0); len(over) == 0; id++ {
		op := n.ns.Store(t.Context(), ids(id%32, 1), n.at(0, 1))
		require.NoError(t, op.Wait(t.Context()))
		until(func() bool { return len(n.writes) == 0 })
		if id < 32 {
			go func() { <-op.Durable(); over <- id }()
		}
	}
	require.Equal(t, InMemory, n.ns.Match(ids(<-over, 1)).Blocks[0])
	d.recording.Unlock()
	n.drained(t)
}

// TestDisksTakeTurns: of disks without jobs each gets its share.
func TestDisksTakeTurns(t *testing.T) {
	dir := t.TempDir()
	n := openNode(t, memoryFile(t), 64, func(c *Config) {
		withDisk(filepath.Join(dir, "a"), 64)(c)
		other := c.Disks[0]
		other.Path = filepath.Join(dir, "b")
		c.Disks = append(c.Disks, other)
	})
	for id := range uint64(8) {
		n.put(t, ids(id, 1))
	}
	n.drained(t)
	require.Equal(t, []int{4, 4}, []int{n.Stats().Disks[0].Blocks, n.Stats().Disks[1].Blocks})
}

// TestSlowAfterIsATime: a number of nanoseconds, as one who left out the unit has it, is refused.
func TestSlowAfterIsATime(t *testing.T) {
	c := Config{Memory: MemoryConfig{Path: "m", Bytes: 1 << 30}}
	withDisk("d", 64)(&c)
	c.Disks[0].Extent, c.Disks[0].Bytes = 0, 1<<30
	require.NoError(t, c.Check())
	c.Disks[0].SlowAfter = 5
	require.ErrorContains(t, c.Check(), "from 1ms")
}

// TestDisksInAnotherOrder: whichever order two configs have the same disks in, and by whatever
// names, their files are taken in one order, so that two processes do not wait for each other.
func TestDisksInAnotherOrder(t *testing.T) {
	dir := t.TempDir()
	real, link := filepath.Join(dir, "m"), filepath.Join(dir, "a")
	require.NoError(t, os.Mkdir(real, 0o700))
	require.NoError(t, os.Symlink(real, link))
	first, second := filepath.Join(real, "a"), filepath.Join(real, "b")
	withDisks := func(paths ...string) func(*Config) {
		return func(c *Config) {
			withDisk(paths[0], 32)(c)
			c.Disks = append(c.Disks, c.Disks[0])
			c.Disks[1].Path = paths[1]
		}
	}
	n := openNode(t, memoryFile(t), 24, withDisks(second, first))
	require.Equal(t, second, n.disks[0].cfg.Path, "they keep their numbers")
	e, cfg := n.engine, n.cfg
	n.put(t, ids(0, 16))
	n.drained(t)
	require.NoError(t, n.Cache.Close())

	// The one that is first by its real path is taken: the other is left to who has that.
	lock := func(path string) (*os.File, error) {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	held, err := lock(first)
	require.NoError(t, err)
	cfg.Engine = e
	withDisks(filepath.Join(link, "b"), first)(&cfg)
	ctx, cancel := context.WithCancel(t.Context())
	opened := make(chan error, 1)
	go func() {
		_, err := Open(ctx, cfg)
		opened <- err
	}()
	waits := func() (waits bool) {
		list, err := filepath.Glob("/proc/self/fd/*")
		require.NoError(t, err)
		files := 0
		for _, fd := range list {
			if path, _ := os.Readlink(fd); path == first {
				files++
			}
		}
		return files == 2
	}
	require.Eventually(t, waits, time.Minute, time.Millisecond)
	f, err := lock(second)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	cancel()
	err = <-opened
	require.ErrorIs(t, err, engine.ErrBusy)
	require.ErrorContains(t, err, fmt.Sprintf("process %d", os.Getpid()))
	require.NoError(t, held.Close())

	withDisks(filepath.Join(link, "b"), second)(&cfg)
	_, err = Open(t.Context(), cfg)
	require.ErrorIs(t, err, engine.ErrBounds, "a file that is listed twice waits for itself")
}
