// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Requests for pins, hints and estimates. Answers that are read seldom are JSON.
const (
	kindPin      kind = 32 + iota // namespace, ttl, keys; answer: see appendPin
	kindPinned                    // number of a pin; answer: 1 where it has not ended, else 0
	kindUnpin                     // number of a pin
	kindHint                      // namespace, kind, duration, keys; answer: a HintResult in JSON
	kindEnvelope                  // namespace, an envelope of hints; answer: outcomes in JSON
	kindPrefetch                  // namespace, keys; answer: an Outcome for each
	kindEstimate                  // namespace, keys; answer: an Estimate in JSON
)

// waits reports whether a request may take long: kindCancel ends it, and it is answered even then.
func (k kind) waits() bool {
	switch k {
	case kindLoad, kindStore, kindPin, kindPrefetch:
		return true
	}
	return false
}

// serveSpace serves the requests of this file that name a namespace.
func (s *Server) serveSpace(ctx context.Context, c *client, n *cache.Namespace, what kind,
	r *reader) ([]byte, error) {
	switch what {
	case kindPin:
		ttl := time.Duration(r.u64())
		keys := r.keys(0)
		if r.bad {
			return nil, errGarbled
		}
		return s.pin(ctx, c, n, keys, ttl)
	case kindHint:
		h := cache.Hint{Kind: cache.HintKind(r.u8()), For: time.Duration(r.u64())}
		keys := r.keys(0)
		if r.bad {
			return nil, errGarbled
		}
		result, err := n.Hint(keys, h)
		return asJSON(result), err
	case kindEnvelope:
		outcomes, err := n.HintEnvelope(r.p)
		return asJSON(outcomes), err
	case kindPrefetch, kindEstimate:
		keys := r.keys(0)
		if r.bad {
			return nil, errGarbled
		}
		if what == kindEstimate {
			return asJSON(n.Estimate(keys)), nil
		}
		return ended(n.Prefetch(ctx, keys))
	}
	return nil, fmt.Errorf("no request of kind %d: %w", what, engine.ErrNotSupported)
}

func asJSON(v any) []byte {
	p, err := json.Marshal(v)
	if err != nil {
		return nil // it never fails for these types
	}
	return p
}

// pin pins blocks for a client, until its connection ends at the latest.
func (s *Server) pin(ctx context.Context, c *client, n *cache.Namespace, keys []cache.Key,
	ttl time.Duration) ([]byte, error) {
	if ttl <= 0 || ttl > s.cfg.PinTTLMax {
		return nil, fmt.Errorf("pin for %v, above 0 and up to %v: %w", ttl, s.cfg.PinTTLMax,
			engine.ErrBounds)
	}
	if !OverUnixSocket(c.peer) {
		return nil, fmt.Errorf("pin for another host, which cannot read the memory file: Load the "+
			"blocks: %w", engine.ErrNotSupported)
	}
	s.mu.Lock()
	for id, p := range c.pins {
		select {
		case <-p.Done():
			c.forgetPin(id)
		default:
		}
	}
	// Keys of blocks that are not there take of no budget, but of the server's memory.
	full := len(c.pins)+c.pinning >= s.cfg.PinsMax || c.pinKeys+len(keys) > keysMax
	if !full {
		c.pinning++
		c.pinKeys += len(keys)
	}
	s.mu.Unlock()
	if full {
		return nil, fmt.Errorf("more than %d pins, or %d keys in pins, of one client: %w",
			s.cfg.PinsMax, keysMax, engine.ErrBusy)
	}
	p, err := n.Pin(ctx, keys, ttl)
	s.mu.Lock()
	defer s.mu.Unlock()
	c.pinning--
	if err != nil {
		c.pinKeys -= len(keys)
		return nil, err
	}
	c.lastPin++
	c.pins[c.lastPin] = p // close ends it
	return appendPin(nil, c.lastPin, p), nil
}

// forgetPin no longer counts a pin. The caller holds the server's lock.
func (c *client) forgetPin(id uint32) {
	if p := c.pins[id]; p != nil {
		c.pinKeys -= len(p.Outcomes())
		delete(c.pins, id)
	}
}

// appendPin writes the number of a pin, the path and the ID of the memory file, and for each block
// its outcome, where it lies in the file, and its bytes.
func appendPin(b []byte, id uint32, p *cache.Pin) []byte {
	m, _ := p.Mapped()
	b = binary.LittleEndian.AppendUint32(b, id)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Path)))
	b = append(append(b, m.Path...), m.ID[:]...)
	for k, o := range p.Outcomes() {
		b = append(b, byte(o))
		b = binary.LittleEndian.AppendUint64(b, m.Offs[k])
		b = binary.LittleEndian.AppendUint32(b, m.Sizes[k])
	}
	return b
}

// ofPin serves kindPinned and kindUnpin.
func (s *Server) ofPin(c *client, what kind, r *reader) ([]byte, error) {
	id := r.u32()
	s.mu.Lock()
	p := c.pins[id]
	if what == kindUnpin {
		c.forgetPin(id)
	}
	s.mu.Unlock()
	switch {
	case r.bad:
		return nil, errGarbled
	case what == kindUnpin && p != nil:
		p.Close()
	case what == kindPinned && p != nil:
		if _, alive := p.Mapped(); alive() {
			return []byte{1}, nil
		}
		return []byte{0}, nil
	case what == kindPinned:
		return []byte{0}, nil
	}
	return nil, nil
}
