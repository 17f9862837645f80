// SPDX-License-Identifier: Apache-2.0

package events

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/sluicehq/sluice/kv/cache"
)

var be = binary.BigEndian

// endOfReplay is the number of what ends a replay: -1.
const endOfReplay = math.MaxUint64

func numbered(n uint64) []byte { return be.AppendUint64(nil, n) }

// change is an event for routers, of one key.
type change struct {
	stored bool
	medium medium
	key    cache.Key
}

// appendBatch encodes a KVEventBatch: an array of a time, events and the rank. An event is a map,
// as vLLM 0.32 has it, tagged by "type"; one holds all keys of like changes in a row.
func appendBatch(p []byte, at time.Time, cleared bool, changes []change) []byte {
	p = append(p, 0x93, 0xcb)
	p = be.AppendUint64(p, math.Float64bits(float64(at.UnixMicro())/1e6))
	p = append(p, 0xdd, 0, 0, 0, 0)
	events, count := uint32(0), len(p)-4 // and where it goes
	if cleared {
		p = appendText(append(p, 0x81), "type", "AllBlocksCleared")
		events++
	}
	for len(changes) > 0 {
		c, n := changes[0], 1
		for n < len(changes) && changes[n].stored == c.stored && changes[n].medium == c.medium {
			n++
		}
		// The cache knows neither tokens nor what came before a block. For tiers behind the GPU
		// vLLM's own events leave these empty, too.
		if c.stored {
			p = appendText(append(p, 0x88), "type", "BlockStored", "parent_block_hash")
			p = appendText(append(p, 0xc0), "token_ids")
			p = appendText(append(p, 0x90), "block_size")
			p = appendText(append(p, 0x00), "lora_id")
			p = appendText(append(p, 0xc0), "lora_name")
			p = append(p, 0xc0)
		} else {
			p = appendText(append(p, 0x83), "type", "BlockRemoved")
		}
		p = appendText(p, "medium", [...]string{cpu: "CPU", storage: "STORAGE"}[c.medium],
			"block_hashes")
		p = be.AppendUint32(append(p, 0xdd), uint32(n))
		for _, c := range changes[:n] {
			p = append(append(p, 0xc4, byte(len(c.key))), c.key[:]...)
		}
		changes = changes[n:]
		events++
	}
	be.PutUint32(p[count:], events)
	return append(p, 0x00)
}

// appendText encodes texts of at most 31 bytes.
func appendText(p []byte, list ...string) []byte {
	for _, text := range list {
		p = append(append(p, 0xa0|byte(len(text))), text...)
	}
	return p
}
