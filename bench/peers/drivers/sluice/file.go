// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/bench/peers"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// blockSize is what pieces are multiples of that go past the page cache.
const blockSize = 4 << 10

// fileEnd moves bytes between its memory and a file, by one engine that goes past the page
// cache and one that goes through it, as the others do by two descriptors.
type fileEnd struct {
	memory         []byte
	owner          *engine.Memory // of memory
	blocks, pieces half
}

// half is an engine, which is its own peer.
type half struct {
	eng    *engine.Engine
	memory *engine.Region
	file   *posix.File
	peer   *engine.Peer
	remote *engine.Remote
}

// Open implements peers.End.
func (e *fileEnd) Open(r *peers.Request) (peers.Answer, error) {
	if r.Lane != string(peers.File) {
		return peers.Answer{}, fmt.Errorf("it is for lane %s: %w", peers.File, peers.ErrUnsupported)
	}
	var err error
	if e.owner, err = engine.Alloc(r.Bytes, engine.AllocOptions{Purpose: "bench",
		Populate: true}); err != nil {
		return peers.Answer{}, err
	}
	e.memory = e.owner.Bytes()
	err = errors.Join(e.blocks.open(e.memory, false), e.pieces.open(e.memory, true))
	return peers.Answer{Version: "sluice", Settings: "backend posix, memory of engine.Alloc; for " +
		"pieces that are no blocks one with Buffered"}, err
}

func (h *half) open(memory []byte, buffered bool) error {
	b, err := posix.New(posix.Config{Buffered: buffered})
	if err != nil {
		return err
	}
	if h.eng, err = engine.Open(engine.Config{Backends: []driver.Backend{b}}); err != nil {
		return err
	}
	h.memory, err = h.eng.Register("memory", engine.HostSegment(memory))
	return err
}

// Memory implements peers.End.
func (e *fileEnd) Memory() []byte { return e.memory }

// Connect implements peers.End: the card is the path of a file.
func (e *fileEnd) Connect(text string) error {
	var c struct {
		Path string `json:"path"`
	}
	b, err := base64.StdEncoding.DecodeString(text)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	return errors.Join(e.blocks.connect(c.Path), e.pieces.connect(c.Path))
}

func (h *half) connect(path string) (err error) {
	if h.file, err = posix.Open(path, posix.OpenOptions{}); err != nil {
		return err
	}
	if _, err = h.eng.Register(regionName, h.file.Segment()); err != nil {
		return err
	}
	if h.peer, err = h.eng.Self(); err != nil {
		return err
	}
	h.remote, err = h.peer.Remote(regionName)
	return err
}

// Prepare implements peers.End.
func (e *fileEnd) Prepare(op string, size uint64, local, remote []int32) (peers.Posting, error) {
	h := &e.blocks
	if size%blockSize != 0 {
		h = &e.pieces
	}
	return prepare(h.eng, h.peer, places{h.memory, h.remote}, op, size, local, remote)
}

func (e *fileEnd) none() error { return fmt.Errorf("a file is no peer: %w", peers.ErrUnsupported) }

// Regions implements peers.End.
func (e *fileEnd) Regions(int, uint64) (peers.Answer, error) { return peers.Answer{}, e.none() }

// Notify implements peers.End.
func (e *fileEnd) Notify([]byte) error { return e.none() }

// Receive implements peers.End.
func (e *fileEnd) Receive() (bool, error) { return false, e.none() }

func (e *fileEnd) close() {
	for _, h := range []*half{&e.blocks, &e.pieces} {
		if h.eng != nil {
			h.eng.Close()
		}
		if h.file != nil {
			h.file.Close()
		}
	}
	if e.owner != nil {
		e.owner.Close()
	}
}
