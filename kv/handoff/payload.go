// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"encoding/binary"

	"github.com/sluicehq/sluice/kv/pool"
)

// begin is what a sender asks for.
type begin struct {
	request     uint64
	fingerprint uint64 // of the sender's geometry
	hashes      []pool.Hash
}

const (
	beginLen = 8 + 8 + 4
	hashLen  = len(pool.Hash{})
)

// beginMax is the length of a begin of that many blocks.
func beginMax(blocks int) uint64 { return beginLen + uint64(blocks)*uint64(hashLen) }

func (b *begin) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, b.request)
	dst = binary.LittleEndian.AppendUint64(dst, b.fingerprint)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(b.hashes)))
	for _, h := range b.hashes {
		dst = append(dst, h[:]...)
	}
	return dst
}

func decodeBegin(p []byte) (b begin, err error) {
	if len(p) < beginLen {
		return b, garbled("a begin of %d bytes", len(p))
	}
	b.request, b.fingerprint = binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
	n := binary.LittleEndian.Uint32(p[16:])
	p = p[beginLen:]
	if uint64(len(p)) != uint64(n)*uint64(hashLen) {
		return b, garbled("%d hashes in %d bytes", n, len(p))
	}
	b.hashes = make([]pool.Hash, n)
	for i := range b.hashes {
		b.hashes[i] = pool.Hash(p[i*hashLen:])
	}
	return b, nil
}

// place is where a missing block goes.
type place struct {
	index int    // in the hashes of the begin
	lease []byte // token
}

const (
	grantLen = 4
	placeLen = 4 + 2 // index and length of the token, then the token

	tokenMax = 8 << 10 // of a lease: a token of each of many backends
)

// grantMax is the length of a grant of that many blocks.
func grantMax(blocks int) uint64 { return grantLen + uint64(blocks)*(placeLen+tokenMax) }

func appendGrant(dst []byte, places []place) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(places)))
	for _, p := range places {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(p.index))
		dst = binary.LittleEndian.AppendUint16(dst, uint16(len(p.lease)))
		dst = append(dst, p.lease...)
	}
	return dst
}

// decodeGrant reads the places of a request of that many blocks. Indices ascend,
// so that none is named twice. Tokens refer to p.
func decodeGrant(p []byte, blocks int) ([]place, error) {
	if len(p) < grantLen {
		return nil, garbled("a grant of %d bytes", len(p))
	}
	n := binary.LittleEndian.Uint32(p)
	if uint64(n) > uint64(blocks) {
		return nil, garbled("places for %d blocks of %d", n, blocks)
	}
	p = p[grantLen:]
	places := make([]place, n)
	next := uint32(0)
	for i := range places {
		if len(p) < placeLen {
			return nil, garbled("a grant cut short")
		}
		index, lease := binary.LittleEndian.Uint32(p), int(binary.LittleEndian.Uint16(p[4:]))
		p = p[placeLen:]
		if index < next || uint64(index) >= uint64(blocks) || lease == 0 || lease > tokenMax ||
			lease > len(p) {
			return nil, garbled("place %d: block %d of %d, lease of %d bytes", i, index, blocks,
				lease)
		}
		places[i] = place{int(index), p[:lease:lease]}
		p, next = p[lease:], index+1
	}
	if len(p) != 0 {
		return nil, garbled("%d bytes behind a grant", len(p))
	}
	return places, nil
}
