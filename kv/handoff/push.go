// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/pool"
)

// Push is one request on its way to a Receiver. It holds resources of both sides
// until Finish has succeeded or Abort was called. Layer may be called by several
// goroutines, Abort and the others by any; Finish by one.
type Push struct {
	outgoing
	s       *Sender
	line    *line
	peer    *engine.Peer
	session uint64
	blocks  []Block
	targets []target // the missing blocks, ascending; set before ready is closed

	flights    chan *flight  // posted, in order; never full
	granted    chan struct{} // closed when all of the grant is there
	endedThere chan struct{} // closed with reasonThere

	// Guarded by mu.
	reasonThere Reason
	grant       assembly
	claimed     []bool // layers
}

// target is a missing block: from where to where.
type target struct {
	index  int // in blocks
	local  uint32
	remote *engine.Remote
}

// newSession draws a number that only the two sides know: it is what entitles a
// message to be heard, and it tells attempts at the same request apart.
func newSession() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

func (s *Sender) open(peer *engine.Peer, request uint64, blocks []Block) (*Push, error) {
	layers := s.cfg.Geometry.Layers()
	p := &Push{
		outgoing: newOutgoing(request, s.cfg.Window), s: s, peer: peer,
		blocks:  append([]Block(nil), blocks...),
		flights: make(chan *flight, s.cfg.Window), granted: make(chan struct{}),
		endedThere: make(chan struct{}), claimed: make([]bool, layers),
	}
	p.unposted = layers
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, engine.ErrClosed
	}
	if len(s.pushes) >= s.cfg.PushesMax {
		return nil, fmt.Errorf("%d requests are under way: wait for some or raise PushesMax: %w",
			len(s.pushes), engine.ErrFull)
	}
	p.session = newSession()
	p.line = s.join(peer)
	s.pushes[p.session] = p
	s.count.begun.Add(1)
	return p, nil
}

// begin asks, waits for the answer, and imports the leases.
func (p *Push) begin(ctx context.Context) error {
	ask := begin{request: p.request, fingerprint: p.s.cfg.Geometry.Fingerprint(),
		hashes: make([]pool.Hash, len(p.blocks))}
	for i, b := range p.blocks {
		ask.hashes[i] = b.Hash
	}
	if err := sendFragments(ctx, p.peer, toReceiver, kindBegin, p.session, ask.append(nil),
		p.s.cfg.MessageMax); err != nil {
		return fmt.Errorf("ask for room: %w", err)
	}
	select {
	case <-p.granted:
	case <-p.over:
		return p.Err()
	case <-ctx.Done():
		return fmt.Errorf("wait for room: %w", context.Cause(ctx))
	}
	return p.importLeases(ctx)
}

// importLeases looks between two imports whether the push is wanted still: each may wait for an
// answer of the receiver.
func (p *Push) importLeases(ctx context.Context) error {
	places, err := decodeGrant(p.grant.bytes, len(p.blocks)) // whole: no append writes into it
	if err != nil {
		return err
	}
	p.targets = make([]target, 0, len(places))
	for _, at := range places {
		select {
		case <-p.over:
			return p.Err()
		case <-ctx.Done():
			return fmt.Errorf("import the leases: %w", context.Cause(ctx))
		default:
		}
		remote, err := p.peer.Import(at.lease)
		if err != nil {
			return fmt.Errorf("import the lease of block %d: %w", at.index, err)
		}
		p.targets = append(p.targets, target{at.index, p.blocks[at.index].Local, remote})
		if remote.Size() != p.s.cfg.Geometry.BlockBytes() {
			return garbled("a lease of %d bytes for a block of %d", remote.Size(),
				p.s.cfg.Geometry.BlockBytes())
		}
	}
	p.s.count.reused.Add(uint64(len(p.blocks) - len(places)))
	return nil
}

// Missing returns how many blocks the receiver lacks: those that are written.
func (p *Push) Missing() int { return len(p.targets) }

// MissingBlocks returns which blocks those are, as ascending indices into what
// Begin was given: the others are not read, and need no content.
func (p *Push) MissingBlocks() []int {
	list := make([]int, len(p.targets))
	for i, t := range p.targets {
		list[i] = t.index
	}
	return list
}
