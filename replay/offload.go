// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/store"
)

// Offload has the decode process spill blocks to a file, and read them back.
type Offload struct {
	File    string `json:"file"`    // a store that is kept; empty: one of its own in Dir
	Dir     string `json:"dir"`     // of a file that has lost its name before it has any bytes
	Bytes   uint64 `json:"bytes"`   // of blocks in the file; 0: chosen
	Durable bool   `json:"durable"` // a block counts once the disk has it

	Blocks uint64 `json:"blocks"` // room in the file, chosen by the parent
}

const (
	offloadBytes = 4 << 30  // 4 GiB, of blocks in the file, unless the command line says otherwise
	recallBytes  = 64 << 20 // 64 MiB, of one transfer, or one block where that is larger
)

// choose decides how many blocks the file has: all of the trace where that is not too much.
func (o *Offload) choose(p *Plan) error {
	g, err := p.geometry(1, layout.BlockMajor)
	if err != nil {
		return err
	}
	shape := o.shape(g)
	distinct := map[uint64]struct{}{}
	for i := range p.Requests {
		for _, id := range p.Requests[i].HashIDs {
			distinct[id] = struct{}{}
		}
	}
	o.Blocks = min(uint64(len(distinct)), max(offloadBytes/shape.Stride(), 1))
	if o.Bytes > 0 {
		if o.Blocks = o.Bytes / shape.Stride(); o.Blocks == 0 {
			return fmt.Errorf("a block takes %s of a file, size of --offload is %s",
				figures.RoundSize(shape.Stride()), figures.FormatSize(o.Bytes))
		}
	}
	o.Blocks = min(max(o.Blocks, 1), 1<<31)
	return nil
}

// shape is that of a store for blocks of this geometry.
func (o *Offload) shape(g *layout.Geometry) store.Geometry {
	s := store.Geometry{BlockBytes: g.BlockBytes(), Blocks: o.Blocks}
	n := copy(s.Tag[:], "sluice replay")
	binary.LittleEndian.PutUint64(s.Tag[n+3:], g.Fingerprint())
	return s
}

// batch is how many blocks one transfer moves, and so what the memory beside the pool is for.
func (o *Offload) batch(g *layout.Geometry) int {
	s := o.shape(g)
	return int(max(min(recallBytes/s.Stride(), o.Blocks), 1))
}

// memory is what the decode process takes beside its pool.
func (o *Offload) memory(g *layout.Geometry) uint64 {
	if o == nil {
		return 0
	}
	return 2 * uint64(o.batch(g)) * g.Stride() // to read back to, and for the plain reads
}

// openStore makes the file, or takes a kept one that is there already.
func (o *Offload) openStore(g *layout.Geometry) (s *store.Store, path string, err error) {
	if o.File != "" {
		s, err = attach(o.File, store.Options{Durable: o.Durable})
		switch {
		case err == nil:
			return o.takeUp(s, g)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, "", fmt.Errorf("%w: choose another file", err)
		}
		s, err = o.create(o.File, g)
		return s, o.File, err
	}
	dir, err := os.MkdirTemp(o.Dir, "sluice-offload-")
	if err != nil {
		return nil, "", fmt.Errorf("make a folder for the file: %w", err)
	}
	// the file stays for as long as it is open, even where this process is killed
	defer os.RemoveAll(dir)
	path = filepath.Join(dir, "blocks")
	s, err = o.create(path, g)
	return s, path, err
}

func (o *Offload) create(path string, g *layout.Geometry) (*store.Store, error) {
	s, err := store.Create(path, o.shape(g), store.Options{Durable: o.Durable})
	var full *store.RoomError
	if errors.As(err, &full) {
		return nil, fmt.Errorf("%w: give a smaller size, or a path on another disk", err)
	}
	return s, err
}

// attachWait is how long the kernel may take to end what a killed process had begun.
const attachWait = 5 * time.Second

func attach(path string, o store.Options) (s *store.Store, err error) {
	for end := time.Now().Add(attachWait); ; time.Sleep(10 * time.Millisecond) {
		if s, err = store.Open(path, o); !errors.Is(err, engine.ErrBusy) || time.Now().After(end) {
			return s, err
		}
	}
}

// takeUp checks that a kept store is for these blocks.
func (o *Offload) takeUp(s *store.Store, g *layout.Geometry) (*store.Store, string, error) {
	have, want := s.Geometry(), o.shape(g)
	if o.Bytes == 0 {
		want.Blocks = have.Blocks
	}
	if have == want {
		o.Blocks = have.Blocks
		return s, o.File, nil
	}
	_ = s.Close()
	return nil, "", fmt.Errorf("%s has %d blocks of %d bytes, this replay wants %d of %d bytes "+
		"of %s: choose another file, or remove it",
		o.File, have.Blocks, have.BlockBytes, want.Blocks, want.BlockBytes, g.Model())
}
