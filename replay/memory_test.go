// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// TestStagingIsARing: layers that share a slot share bytes, neighbours do not.
func TestStagingIsARing(t *testing.T) {
	for _, model := range []string{"deepseek-v3.2", "llama3.1-8b"} {
		s, err := newStaging(&Plan{Model: model}, 3)
		if err != nil {
			t.Fatal(err)
		}
		if uint64(len(s.mem)) != s.geometry.PoolBytes() || s.geometry.Blocks() < 3 {
			t.Errorf("%s: %d bytes for %d blocks", model, len(s.mem), s.geometry.Blocks())
		}
		last := len(s.geometry.Parts()) - 1
		write, err := s.piece(2, 0, last)
		if err != nil {
			t.Fatal(err)
		}
		fill(write, 1)
		for layer, same := range map[int]bool{1: false, 2: true, 3: false, 4: true} {
			read, err := s.piece(2, layer, last)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Equal(read, write) != same {
				t.Errorf("%s: layer %d has the bytes of layer 0: %v, want %v", model, layer, !same,
					same)
			}
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}
}

// pieces of a layer for the baseline.
func pieces(n, size int) [][]byte {
	list := make([][]byte, n)
	for i := range list {
		list[i] = make([]byte, size)
		fill(list[i], byte(i+1))
	}
	return list
}

func TestBaselineCopiesEveryPiece(t *testing.T) {
	for _, threads := range []int{1, 3} {
		b, err := newBaseline(10*4096, 0, threads)
		if err != nil {
			t.Fatal(err)
		}
		list := pieces(10, 4096)
		b.run(list)
		b.run(list) // begins at the start again
		if b.bytes != 2*10*4096 || b.took <= 0 {
			t.Errorf("%d bytes in %v", b.bytes, b.took)
		}
		if want := bytes.Join(list, nil); !bytes.Equal(b.memory.Bytes(), want) {
			t.Errorf("%d threads: bytes differ", threads)
		}
		b.memory.Close()
	}
}

// poolOf is a decode side's memory with three blocks, of which the first one is
// that of hash 7.
func poolOf(t *testing.T) (*checker, *handoff.Request) {
	t.Helper()
	g, err := (&Plan{Model: "deepseek-v3.2-indexer"}).geometry(3, layout.BlockMajor)
	if err != nil {
		t.Fatal(err)
	}
	m, err := hostmem.Alloc(g.PoolBytes(), hostmem.Options{Purpose: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	c := &checker{geometry: g, memory: m.Bytes()}
	for layer := range g.Layers() {
		b, err := c.layer(0, layer)
		if err != nil {
			t.Fatal(err)
		}
		for part := range g.Parts() {
			cell := content.Cell{Request: 7, Part: uint64(part), Layer: layer}
			cell.Fill(b[:g.PartBytes(part)])
			b = b[g.PartBytes(part):]
		}
	}
	return c, &handoff.Request{GroupRequest: &handoff.GroupRequest{ID: 4},
		Hashes: []pool.Hash{pool.HashOf(7)}, Blocks: []uint32{0}, Missing: []int{0}}
}

func TestCheckerFindsEveryWrongLayer(t *testing.T) {
	c, q := poolOf(t)
	if c.request(q); c.mismatches != 0 || c.checked != 1 {
		t.Fatalf("%d mismatches in %d good blocks: %v", c.mismatches, c.checked, c.first)
	}
	for _, layer := range []int{0, 17, 60} {
		b, _ := c.layer(0, layer)
		b[len(b)-1] ^= 0x80
	}
	if c.request(q); c.mismatches != 3 || len(c.first) != 3 {
		t.Fatalf("%d mismatches, want 3: %v", c.mismatches, c.first)
	}
	if !strings.Contains(c.first[1], "request 5, hash 7, layer 17 in block 0") {
		t.Errorf("the mismatch is called %q", c.first[1])
	}
	q.Blocks[0] = 1 // never written
	if c.request(q); c.mismatches != 3+61 || len(c.first) != firstMax {
		t.Errorf("%d mismatches, %d in words", c.mismatches, len(c.first))
	}
}

func TestLateWritesAreFound(t *testing.T) {
	c, q := poolOf(t)
	blocks, err := pool.New(3)
	if err != nil {
		t.Fatal(err)
	}
	w := &lateWrites{checker: c, blocks: blocks, poisoned: map[uint32]int{}}
	w.freed(q)
	if w.count != 1 || c.mismatches != 0 || blocks.Stats().Used != 0 {
		t.Fatalf("%d blocks watched, %d mismatches, %+v", w.count, c.mismatches, blocks.Stats())
	}
	late, _ := c.layer(0, 30)
	late[5] = 0
	if w.last(); c.mismatches != 1 || !strings.Contains(c.first[0], "block 0, layer 30 was "+
		"written after the abort of request 5") {
		t.Errorf("%d mismatches: %v", c.mismatches, c.first)
	}
	w.forget(q) // now another request's
	if w.last(); c.mismatches != 1 {
		t.Error("a block of another request is watched")
	}
}

func TestReportErr(t *testing.T) {
	r := merge(&Plan{}, &PrefillResult{Bytes: 10, Transfer: 5, MemcpyBytes: 10, Memcpy: 4},
		&DecodeResult{}, 0)
	if r.Err() != nil || r.GBps != 2 || r.MemcpyGBps != 2.5 || r.Ratio != 0.8 ||
		r.FirstMismatches == nil {
		t.Errorf("report %+v, %v", r, r.Err())
	}
	r = merge(&Plan{}, &PrefillResult{}, &DecodeResult{Mismatches: 1, First: []string{"here"}}, 0)
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), "here") {
		t.Errorf("mismatch: %v", err)
	}
	r = merge(&Plan{}, &PrefillResult{}, &DecodeResult{Leaked: 2}, 0)
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), "2 blocks") {
		t.Errorf("leak: %v", err)
	}
}
