// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// checker compares the content of blocks with what it must be. It checks one request at a time.
type checker struct {
	geometry *layout.Geometry
	memory   []byte

	mu         sync.Mutex
	checked    uint64 // blocks
	mismatches uint64
	first      []string      // texts of the first mismatches
	took       time.Duration // time that the checks took
}

// firstMax is how many mismatches the report describes.
const firstMax = 8

// idOf returns the number from which pool.HashOf made a hash.
func idOf(h pool.Hash) uint64 { return binary.BigEndian.Uint64(h[8:]) }

// layer returns the bytes of a layer of a block.
func (c *checker) layer(block uint32, layer int) ([]byte, error) {
	r, err := c.geometry.Piece(uint64(block), layer, 0)
	if err != nil {
		return nil, err
	}
	n := c.geometry.LayerBytes()
	return c.memory[r.Off : r.Off+n : r.Off+n], nil
}

// request checks every layer of every block of a completed request, including the blocks that the
// pool had already cached.
func (c *checker) request(q *handoff.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	for at, block := range q.Blocks {
		id := idOf(q.Hashes[at])
		for layer := range c.geometry.Layers() {
			b, err := c.layer(block, layer)
			if err != nil {
				c.mismatch("request %d, block %d: %v", requestOf(q)+1, block, err)
				continue
			}
			if n := c.wrong(b, id, layer); n > 0 {
				c.mismatch("request %d, hash %d, layer %d in block %d: %d of %d bytes differ",
					requestOf(q)+1, id, layer, block, n, len(b))
			}
		}
		c.checked++
	}
	c.took += time.Since(start)
}

// wrong counts the bytes of a layer of a block that are not those of its hash.
func (c *checker) wrong(b []byte, id uint64, layer int) (n uint64) {
	for part := range c.geometry.Parts() {
		cell := content.Cell{Request: id, Part: uint64(part), Layer: layer}
		n += cell.Wrong(b[:c.geometry.PartBytes(part)])
		b = b[c.geometry.PartBytes(part):]
	}
	return n
}

// mismatch counts a mismatch and keeps its text. Preconditions: c.mu is held.
func (c *checker) mismatch(format string, args ...any) {
	c.mismatches++
	if len(c.first) < firstMax {
		c.first = append(c.first, fmt.Sprintf(format, args...))
	}
}
