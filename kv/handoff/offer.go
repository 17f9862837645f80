// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"encoding/binary"

	"github.com/sluicehq/sluice/kv/pool"
)

// RequestBlocksMax bounds the blocks of one request.
const RequestBlocksMax = 1 << 20

// offer is what a Sender tells a Receiver before the two hand a request over.
type offer struct {
	request     uint64
	fingerprint uint64 // of the sender's geometry
	hashes      []pool.Hash
}

const (
	offerLen = 8 + 8
	hashLen  = len(pool.Hash{})
)

// offerMax is the length of an offer of that many blocks.
func offerMax(blocks int) uint64 { return offerLen + uint64(blocks)*uint64(hashLen) }

func (o *offer) append(dst []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, o.request)
	dst = binary.LittleEndian.AppendUint64(dst, o.fingerprint)
	for _, h := range o.hashes {
		dst = append(dst, h[:]...)
	}
	return dst
}

func decodeOffer(p []byte) (o offer, err error) {
	if len(p) < offerLen || (len(p)-offerLen)%hashLen != 0 {
		return o, garbled("an offer of %d bytes", len(p))
	}
	o.request, o.fingerprint = binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
	p = p[offerLen:]
	o.hashes = make([]pool.Hash, len(p)/hashLen)
	for i := range o.hashes {
		o.hashes[i] = pool.Hash(p[i*hashLen:])
	}
	return o, nil
}

// answerMax is the length of an answer to an offer of that many blocks.
func answerMax(blocks int) uint64 { return 4 + 4*uint64(blocks) }

// appendAnswer writes which blocks a Receiver lacks, as indices in the offer.
func appendAnswer(dst []byte, missing []int) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(missing)))
	for _, at := range missing {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(at))
	}
	return dst
}

// decodeAnswer reads the answer to an offer of that many blocks. Indices ascend, so that none is
// named twice.
func decodeAnswer(p []byte, blocks int) ([]int, error) {
	if len(p) < 4 || uint64(len(p)) != 4+4*uint64(binary.LittleEndian.Uint32(p)) {
		return nil, garbled("an answer of %d bytes", len(p))
	}
	missing := make([]int, len(p)/4-1)
	next := 0
	for i := range missing {
		at := int(binary.LittleEndian.Uint32(p[4+4*i:]))
		if at < next || at >= blocks {
			return nil, garbled("missing block %d of %d is number %d", i, blocks, at)
		}
		missing[i], next = at, at+1
	}
	return missing, nil
}
