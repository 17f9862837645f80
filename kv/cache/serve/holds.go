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

// Requests for pins, hints, estimates and events. Answers that are read seldom are JSON.
const (
	kindPin      kind = 32 + iota // namespace, ttl, keys; answer: see appendPin
	kindPinned                    // number of a pin; answer: 1 where it has not ended, else 0
	kindUnpin                     // number of a pin
	kindHint                      // namespace, kind, duration, keys; answer: a HintResult in JSON
	kindEnvelope                  // namespace, an envelope of hints; answer: outcomes in JSON
	kindPrefetch                  // namespace, keys; answer: an Outcome for each
	kindEstimate                  // namespace, keys; answer: an Estimate in JSON
	kindEvents                    // answer, once there are some: events in JSON
)

// waits reports whether a request may take long: kindCancel ends it, and it is answered even then.
func (k kind) waits() bool {
	switch k {
	case kindLoad, kindStore, kindPin, kindPrefetch, kindEvents:
		return true
	}
	return false
}

// eventsMax is how many events one answer has.
const eventsMax = 256

// serveSpace does what a request of holds.go asks for, in a namespace.
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
		op := n.Prefetch(ctx, keys)
		<-op.Done() // ctx ends it
		body := make([]byte, len(keys))
		for k, o := range op.Outcomes() {
			body[k] = byte(o)
		}
		return body, op.Err()
	}
	return nil, fmt.Errorf("no request of kind %d: %w", what, engine.ErrNotSupported)
}

func asJSON(v any) []byte {
	p, err := json.Marshal(v)
	if err != nil {
		return nil // of what these types have it never fails
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
	s.mu.Lock()
	for id, p := range c.pins {
		select {
		case <-p.Done():
			delete(c.pins, id)
		default:
		}
	}
	full := len(c.pins)+c.pinning >= s.cfg.PinsMax
	if !full {
		c.pinning++
	}
	s.mu.Unlock()
	if full {
		return nil, fmt.Errorf("%d pins of one client: %w", s.cfg.PinsMax, engine.ErrBusy)
	}
	p, err := n.Pin(ctx, keys, ttl)
	s.mu.Lock()
	defer s.mu.Unlock()
	c.pinning--
	if err != nil {
		return nil, err
	}
	c.lastPin++
	c.pins[c.lastPin] = p // close ends it
	return appendPin(nil, c.lastPin, p), nil
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
		delete(c.pins, id)
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

// events waits for events of the namespaces that a client has opened. One request of a client waits
// at a time.
func (s *Server) events(ctx context.Context, c *client) ([]byte, error) {
	s.mu.Lock()
	if c.listening {
		s.mu.Unlock()
		return nil, fmt.Errorf("another request waits for events: %w", engine.ErrBusy)
	}
	c.listening = true
	if c.events == nil {
		c.events = s.cfg.Cache.Events(c.ctx)
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		c.listening = false
		s.mu.Unlock()
	}()
	var list []cache.Event
	add := func(e cache.Event) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if e.Kind == cache.EventsLost || c.names[e.Namespace] {
			e.Lost += c.lost
			c.lost = 0
			list = append(list, e)
		} else {
			c.lost += e.Lost
		}
	}
	for len(list) == 0 {
		select {
		case e, open := <-c.events:
			if !open {
				return nil, fmt.Errorf("events: too many read them, or the cache ends: %w",
					engine.ErrBusy)
			}
			add(e)
		case <-ctx.Done():
			return asJSON(list), nil
		}
	}
	for len(list) < eventsMax {
		select {
		case e, open := <-c.events:
			if open {
				add(e)
				continue
			}
		default:
		}
		break
	}
	return asJSON(list), nil
}
