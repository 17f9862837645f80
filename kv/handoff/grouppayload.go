// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupBegin is the message with which a sending rank begins a request at a receiving rank.
type groupBegin struct {
	request uint64
	plan    [sha256.Size]byte
	op      engine.Op // of the edge between the two; 0: there is none
	digests bool
	seed    layout.Seed // of the digests
	span    layout.Span
	places
}

// places says where one rank has a request, with the leases by which the other reaches those bytes:
// those of the sender if the receiver reads, those of the receiver if the sender writes.
type places struct {
	tables layout.Tables
	tokens []token
}

// token is the token of a lease of a request, in one region and for some layers.
type token struct {
	layerRange
	lease []byte
}

const (
	digestLen     = 3 * 8
	seedLen       = len(layout.Seed{})
	groupBeginLen = 8 + sha256.Size + 1 + 1 + seedLen + 2*8 // and places

	groupTokensMax = 32 << 20 // bytes of all leases of a request on a rank
	blocksMax      = 1 << 20  // of a request
)

// placesMax returns the most bytes that the places of another rank may have. That rank sends places
// if the operation of the edge is op.
func (r *rank) placesMax(other int, op engine.Op) uint64 {
	if r.op(other) != op {
		return 2 + 4
	}
	return 2 + 4 + 4*uint64(len(r.others[other].Groups)) + 4*blocksMax + groupTokensMax
}

func (p *places) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(p.tables)))
	for _, table := range p.tables {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(table)))
		for _, block := range table {
			dst = binary.LittleEndian.AppendUint32(dst, block)
		}
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(p.tokens)))
	for _, t := range p.tokens {
		for _, n := range []int{t.region, t.first, t.end} {
			dst = binary.LittleEndian.AppendUint16(dst, uint16(n))
		}
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(t.lease)))
		dst = append(dst, t.lease...)
	}
	return dst
}

// decodePlaces reads all of b. Leases refer to it.
func decodePlaces(b []byte) (p places, err error) {
	r := places{}
	n, b, ok := cut16(b)
	for range n {
		var slots int
		if slots, b, ok = cut32(b, ok); !ok || slots > len(b)/4 {
			return p, garbled("a block table cut short")
		}
		table := make([]uint32, slots)
		for i := range table {
			table[i] = binary.LittleEndian.Uint32(b[4*i:])
		}
		r.tables, b = append(r.tables, table), b[4*slots:]
	}
	if !ok {
		return p, garbled("places cut short")
	}
	n, b, ok = cut32(b, true)
	for range n {
		var t token
		var length int
		for _, n := range []*int{&t.region, &t.first, &t.end} {
			if ok {
				*n, b, ok = cut16(b)
			}
		}
		length, b, ok = cut32(b, ok)
		if !ok || length == 0 || length > len(b) {
			return p, garbled("a lease cut short")
		}
		t.lease, b = b[:length:length], b[length:]
		r.tokens = append(r.tokens, t)
	}
	if !ok || len(b) != 0 {
		return p, garbled("%d bytes behind places", len(b))
	}
	return r, nil
}

func cut16(b []byte) (int, []byte, bool) {
	if len(b) < 2 {
		return 0, b, false
	}
	return int(binary.LittleEndian.Uint16(b)), b[2:], true
}

func cut32(b []byte, ok bool) (int, []byte, bool) {
	if !ok || len(b) < 4 {
		return 0, b, false
	}
	return int(binary.LittleEndian.Uint32(b)), b[4:], true
}

func (g *groupBegin) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, g.request)
	dst = append(append(dst, g.plan[:]...), byte(g.op), 0)
	if g.digests {
		dst[len(dst)-1] = 1
	}
	dst = append(dst, g.seed[:]...)
	dst = binary.LittleEndian.AppendUint64(dst, g.span.From)
	dst = binary.LittleEndian.AppendUint64(dst, g.span.To)
	return g.places.append(dst)
}

func decodeGroupBegin(b []byte) (g groupBegin, err error) {
	if len(b) < groupBeginLen {
		return g, garbled("a begin of %d bytes", len(b))
	}
	g.request, b = binary.LittleEndian.Uint64(b), b[8:]
	b = b[copy(g.plan[:], b):]
	if g.op, g.digests = engine.Op(b[0]), b[1] == 1; b[1] > 1 {
		return g, garbled("digests: %d", b[1])
	}
	b = b[2+copy(g.seed[:], b[2:]):]
	g.span = layout.Span{From: binary.LittleEndian.Uint64(b), To: binary.LittleEndian.Uint64(b[8:])}
	g.places, err = decodePlaces(b[16:])
	return g, err
}

func appendDigest(dst []byte, d layout.Digest) []byte {
	for _, n := range []uint64{d.A, d.B, d.Cells} {
		dst = binary.LittleEndian.AppendUint64(dst, n)
	}
	return dst
}

// decodeDigest reads the digest of exactly that many bytes.
func decodeDigest(b []byte) (d layout.Digest, ok bool) {
	if len(b) != digestLen {
		return d, false
	}
	return layout.Digest{A: binary.LittleEndian.Uint64(b), B: binary.LittleEndian.Uint64(b[8:]),
		Cells: binary.LittleEndian.Uint64(b[16:])}, true
}

// question asks a sender for the digest of a part of a layer.
type question struct {
	number uint32 // that the answer has, too
	layer  uint32
	scope  layout.Scope
}

const questionLen = 4 + 4 + 2*4 + 2*8 // then the part

func (q *question) append(dst []byte) []byte {
	for _, n := range []uint32{q.number, q.layer, uint32(q.scope.Units[0]),
		uint32(q.scope.Units[1])} {
		dst = binary.LittleEndian.AppendUint32(dst, n)
	}
	dst = binary.LittleEndian.AppendUint64(dst, q.scope.Tokens.From)
	dst = binary.LittleEndian.AppendUint64(dst, q.scope.Tokens.To)
	return append(dst, q.scope.Part...)
}

func decodeQuestion(b []byte) (q question, ok bool) {
	if len(b) < questionLen {
		return q, false
	}
	u32 := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	q.number, q.layer = u32(0), u32(1)
	q.scope.Units = [2]int{int(u32(2)), int(u32(3))}
	q.scope.Tokens = layout.Span{From: binary.LittleEndian.Uint64(b[16:]),
		To: binary.LittleEndian.Uint64(b[24:])}
	q.scope.Part = string(b[questionLen:])
	return q, q.layer < layout.LayersMax
}
