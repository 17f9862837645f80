// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/crc32"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// TestLoadKeepsItsBlocks: while a Load stands between its pins and its copy, others fill the cache,
// and remove what it loads.
func TestLoadKeepsItsBlocks(t *testing.T) {
	for _, what := range []string{"evicted", "removed"} {
		t.Run(what, func(t *testing.T) {
			n := openNode(t, memoryFile(t), 24, func(c *Config) { c.Policy = LRU })
			keys := keysOf(1, 2, 3)
			require.Equal(t, all(Done, 3), n.put(t, keys))
			standing := testpoint.Stand(t, "cache: pinned")[0]
			op := n.ns.Load(t.Context(), keys, n.at(128, 3))
			<-standing.Came
			if what == "removed" {
				n.ns.Remove(keys)
				require.Equal(t, Nowhere, n.ns.Match(keys).Blocks[0])
			}
			for id := uint64(10); id < 100; id += 10 {
				n.put(t, keysOf(id, id+1, id+2, id+3, id+4, id+5, id+6, id+7))
			}
			standing.GoOn()
			require.NoError(t, op.Wait(t.Context()))
			require.Equal(t, all(Done, 3), op.Outcomes())
			want := make([]byte, blockBytes)
			for k, key := range keys {
				content(key, want)
				require.True(t, bytes.Equal(want, n.mem[(128+k)*blockBytes:][:blockBytes]))
			}
			n.check(t)
		})
	}
}

// TestRemoveWhileItComes: a block that is removed while a Store copies it is not there afterwards.
func TestRemoveWhileItComes(t *testing.T) {
	n := openNode(t, memoryFile(t), 24, nil)
	standing := testpoint.Stand(t, "cache: landed")[0]
	keys := keysOf(1, 2)
	op := n.ns.Store(t.Context(), keys, n.at(0, 2))
	<-standing.Came
	require.Equal(t, []Found{Coming, Coming}, n.ns.Match(keys).Blocks)
	n.ns.Remove(keys[:1])
	standing.GoOn()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, []Found{Nowhere, InMemory}, n.ns.Match(keys).Blocks)
	n.check(t)
}

// copyOf opens a copy of a memory file, as it is now.
func copyOf(t *testing.T, path string) *node {
	other := memoryFile(t)
	p, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(other, p, 0o600))
	return openNode(t, other, 24, nil)
}

// TestRecordGoesFirst: when the slot of a block is given back, no process would find the block any
// more.
func TestRecordGoesFirst(t *testing.T) {
	path := memoryFile(t)
	n := openNode(t, path, 24, nil)
	var ids []uint64
	for id := range uint64(24) {
		ids = append(ids, id)
	}
	require.Equal(t, all(Done, 24), n.put(t, keysOf(ids...)))
	testpoint.First("cache: withdrawn", func() {
		if blocks := copyOf(t, path).Attached().Blocks; blocks != 23 {
			t.Errorf("%d blocks", blocks)
		}
	})
	defer testpoint.First("cache: withdrawn", nil)
	require.Equal(t, all(Done, 1), n.put(t, keysOf(100)))
}

// TestRecordOfOthers: a record is used only as a whole, in its own place, and where no other has
// its slot.
func TestRecordOfOthers(t *testing.T) {
	for name, change := range map[string]func(m *memory, a, b *entry, bAt uint32){
		"key":    func(_ *memory, _, b *entry, _ uint32) { b.key[3]++ },
		"crc":    func(_ *memory, _, b *entry, _ uint32) { b.crc++ },
		"size":   func(_ *memory, _, b *entry, _ uint32) { b.size-- },
		"slot":   func(_ *memory, _, b *entry, _ uint32) { b.slot += granules(blockBytes) },
		"space":  func(_ *memory, _, b *entry, _ uint32) { b.space++ },
		"sum":    func(_ *memory, _, b *entry, _ uint32) { b.sum++ },
		"moved":  func(_ *memory, a, b *entry, _ uint32) { *b = *a },
		"double": func(m *memory, a, b *entry, i uint32) { b.slot = a.slot; b.sum = m.sumOf(i, b) },
		"inside": func(m *memory, _, b *entry, i uint32) { b.slot++; b.sum = m.sumOf(i, b) },
		"past": func(m *memory, _, b *entry, i uint32) {
			b.slot = 1 << 30
			b.sum = m.sumOf(i,
				b)
		},
		"huge": func(m *memory, _, b *entry, i uint32) {
			b.size = 1 << 31
			b.sum = m.sumOf(i,
				b)
		},
		"no namespace": func(m *memory, _, b *entry, i uint32) {
			b.space = 77
			b.sum = m.sumOf(i, b)
		},
		"same key": func(m *memory, a, b *entry, i uint32) {
			b.key, b.crc = a.key, a.crc
			copy(m.bytesOf(b.slot, b.size), m.bytesOf(a.slot, a.size))
			b.sum = m.sumOf(i, b)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := memoryFile(t)
			n := openNode(t, path, 24, nil)
			keys := keysOf(1, 2)
			n.put(t, keys)
			at := map[Key]uint32{}
			for i := range uint32(len(n.memory.entries)) {
				at[n.index.entry(i).key] = i
			}
			b := at[keys[1]]
			change(n.memory, n.index.entry(at[keys[0]]), n.index.entry(b), b)
			n = copyOf(t, path)
			require.Equal(t, 1, n.Attached().Blocks)
			left := 0
			for _, outcome := range n.get(t, keys) {
				if outcome == Done {
					left++
				}
			}
			if name == "double" {
				require.LessOrEqual(t, left, 1,
					"the one that is taken may be the wrong one: damaged")
			} else {
				require.Equal(t, 1, left)
			}
			n.check(t)
		})
	}
}

// TestFileOfOthers: a file that is of no use is made anew, and Open says why; what is no memory
// file at all is left alone.
func TestFileOfOthers(t *testing.T) {
	path := memoryFile(t)
	n := openNode(t, path, 24, nil)
	n.put(t, keysOf(1))
	n.close(t)
	for why, change := range map[string]func(p []byte) []byte{
		"version": func(p []byte) []byte { p[atVersion]++; return p },
		"byte order": func(p []byte) []byte {
			p[atMachine], p[atMachine+7] = p[atMachine+7], p[atMachine]
			return p
		},
		"header is dama":       func(p []byte) []byte { p[atID]++; return p },
		"header is damaged":    func(p []byte) []byte { return p[:100] },
		"it was cut":           func(p []byte) []byte { return p[:len(p)-1] },
		"did not finish":       func(p []byte) []byte { clear(p); return p },
		"before the host":      func(p []byte) []byte { p[atBoot]++; return resum(p) },
		"of another size":      func(p []byte) []byte { p[atMachine+9]++; return resum(p) },
		"entries for blocks, ": func(p []byte) []byte { p[atEntries]++; return resum(p) },
	} {
		t.Run(why, func(t *testing.T) {
			p, err := os.ReadFile(path)
			require.NoError(t, err)
			other := memoryFile(t)
			require.NoError(t, os.WriteFile(other, change(p), 0o600))
			n := openNode(t, other, 24, nil)
			require.Contains(t, n.Attached().Fresh, why)
			require.Equal(t, Nowhere, n.ns.Match(keysOf(1)).Blocks[0])
			require.Equal(t, all(Done, 1), n.put(t, keysOf(1)))
			n.check(t)
		})
	}
	link := memoryFile(t)
	require.NoError(t, os.Symlink(path, link))
	_, err := openMemory(t.Context(), link, n.index.memory.shape)
	require.ErrorIs(t, err, unix.ELOOP)
	require.NoError(t, os.Chmod(path, 0o666))
	_, err = openMemory(t.Context(), path, n.index.memory.shape)
	require.ErrorContains(t, err, "nobody else may write to")
	for _, text := range []string{strings.Repeat("letter ", 10000), "short",
		strings.Repeat("\x00", 1024) + "a filesystem",
		strings.Repeat("\x00", 3<<20) + "_BHRfS_M, and more"} {
		foreign := memoryFile(t)
		require.NoError(t, os.WriteFile(foreign, []byte(text), 0o600))
		_, err = openMemory(t.Context(), foreign, n.index.memory.shape)
		require.ErrorContains(t, err, "no file of a cache for this tier; name another path")
		_, err = openDisk(t.Context(), 0, DiskConfig{Path: foreign, Bytes: 1 << 20,
			Extent: 1 << 20, Blocks: 16})
		require.ErrorContains(t, err, "no file of a cache for this tier; name another path")
		p, err := os.ReadFile(foreign)
		require.NoError(t, err)
		require.Equal(t, text, string(p))
	}
}

// resum makes the header of a file whole again.
func resum(p []byte) []byte {
	binary.LittleEndian.PutUint32(p[atSum:], crc32.Checksum(p[:atSum], castagnoli))
	return p
}

// TestOwnerThatEnds: the kernel gives the lock of a process back before all that it has begun has
// ended. Open waits until the process is gone.
func TestOwnerThatEnds(t *testing.T) {
	path := memoryFile(t)
	n := openNode(t, path, 24, nil)
	n.put(t, keysOf(1))
	child := exec.Command("sleep", "1000")
	require.NoError(t, child.Start())
	start, err := proc.StartOf(child.Process.Pid)
	require.NoError(t, err)
	shape := n.memory.shape
	require.EqualValues(t, os.Getpid(), binary.NativeEndian.Uint64(n.memory.mapped[atPID:]))
	n.close(t)
	p, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Zero(t, binary.NativeEndian.Uint64(p[atPID:]), "one that closed it keeps nobody out")
	binary.NativeEndian.PutUint64(p[atPID:], uint64(child.Process.Pid))
	binary.NativeEndian.PutUint64(p[atStart:], start)
	require.NoError(t, os.WriteFile(path, p, 0o600))

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = openMemory(ctx, path, shape)
	require.ErrorIs(t, err, engine.ErrBusy)
	require.NoError(t, child.Process.Kill())
	m, err := openMemory(t.Context(), path, shape) // before anybody reaps it
	require.NoError(t, err)
	require.True(t, m.found == "" && !m.made)

	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = openMemory(ctx, path, shape)
	require.ErrorIs(t, err, engine.ErrBusy, "two at once")
	require.NoError(t, m.close(false))
	require.Error(t, child.Wait())
}
