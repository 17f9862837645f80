// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// A message is a kind, the number that the client gave the request, and a body; all numbers are
// little-endian. An answer is the kind answered, the number, a code, a text, and a body.
type kind uint8

const (
	kindHello    kind = 1 + iota // version; answer: requests that may run at a time
	kindSpace                    // geometry, name; answer: number of the namespace
	kindRegion                   // token of a lease; answer: number of the region
	kindMatch                    // namespace, keys; answer: a Found for each
	kindLoad                     // namespace, place, keys, slots; answer: an Outcome for each
	kindStore                    // as kindLoad
	kindRemove                   // namespace, keys
	kindCancel                   // ends the request of that number; not answered itself
	kindAnswered                 // the first of an answer
	kindForget                   // the client has revoked the region of that number; not answered
)

const (
	version   = 1
	keysMax   = 64 << 10 // of one request
	headBytes = 1 + 8
)

// code says which of the known errors a text is.
type code uint8

const (
	fine code = iota
	failed
	closed
	busy
	unproven
	outOfBounds
	noRoom
	corrupt
	notSupported
)

var codes = [...]error{nil, errors.New("the cache"), engine.ErrClosed, engine.ErrBusy,
	engine.ErrUnproven, engine.ErrBounds, cache.ErrNoRoom, engine.ErrCorrupt,
	engine.ErrNotSupported}

func codeOf(err error) code {
	if err == nil {
		return fine
	}
	for c := closed; int(c) < len(codes); c++ {
		if errors.Is(err, codes[c]) {
			return c
		}
	}
	return failed
}

var errGarbled = fmt.Errorf("garbled message: %w", engine.ErrCorrupt)

// reader takes a message apart. What is not there is zero, and bad says so in the end.
type reader struct {
	p   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.p) {
		r.bad = true
		r.p = nil
		return make([]byte, max(0, min(n, 64)))
	}
	p := r.p[:n]
	r.p = r.p[n:]
	return p
}

func (r *reader) u8() uint8   { return r.take(1)[0] }
func (r *reader) u16() uint16 { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

// keys reads all that is left but tail bytes for each as keys.
func (r *reader) keys(tail int) []cache.Key {
	n := len(r.p) / (16 + tail)
	if len(r.p) != n*(16+tail) || n > keysMax {
		r.bad = true
		return nil
	}
	keys := make([]cache.Key, n)
	for k := range keys {
		copy(keys[k][:], r.take(16))
	}
	return keys
}

func (r *reader) slots(n int) []uint32 {
	if r.bad {
		return nil
	}
	slots := make([]uint32, n)
	for k := range slots {
		slots[k] = r.u32()
	}
	return slots
}

func head(k kind, id uint64) []byte {
	return binary.LittleEndian.AppendUint64([]byte{byte(k)}, id)
}

func appendKeys(p []byte, keys []cache.Key) []byte {
	for k := range keys {
		p = append(p, keys[k][:]...)
	}
	return p
}

// appendPlace writes all of a place but its peer and its slots.
func appendPlace(p []byte, region uint16, at *cache.Place) []byte {
	p = binary.LittleEndian.AppendUint16(p, region)
	for _, v := range []uint64{at.Base, at.Stride, at.Run} {
		p = binary.LittleEndian.AppendUint64(p, v)
	}
	p = append(p, byte(len(at.Loops)))
	for _, a := range at.Loops {
		p = binary.LittleEndian.AppendUint32(p, a.N)
		p = binary.LittleEndian.AppendUint64(p, a.By)
	}
	return p
}

func (r *reader) place() (region uint16, at cache.Place) {
	region = r.u16()
	at.Base, at.Stride, at.Run = r.u64(), r.u64(), r.u64()
	for range min(r.u8(), 8) {
		at.Loops = append(at.Loops, cache.Axis{N: r.u32(), By: r.u64()})
	}
	return region, at
}

// answer is what a server says to a request.
func answer(id uint64, err error, body []byte) []byte {
	text := ""
	if err != nil {
		text = err.Error()
		text = text[:min(len(text), 1<<10)]
	}
	p := append(head(kindAnswered, id), byte(codeOf(err)))
	p = binary.LittleEndian.AppendUint16(p, uint16(len(text)))
	return append(append(p, text...), body...)
}

// readAnswer is answer, read.
func readAnswer(r *reader) (body []byte, err error) {
	c := code(r.u8())
	text := string(r.take(int(r.u16())))
	if r.bad || int(c) >= len(codes) {
		return nil, errGarbled
	}
	if c != fine {
		err = &answeredError{text, codes[c]}
	}
	return r.p, err
}

// answeredError is what the server answered: its text, which names the cause, and the known error
// that it is.
type answeredError struct {
	text  string
	class error
}

func (e *answeredError) Error() string { return e.text }
func (e *answeredError) Unwrap() error { return e.class }

// errGone is the error of a request to a server that has ended.
var errGone = fmt.Errorf("the server of the cache is gone: Dial it again: %w", engine.ErrPeerLost)

// gone returns errGone for what a request comes to once the server has ended.
func gone(err error) error {
	if errors.Is(err, engine.ErrPeerLost) {
		return errGone
	}
	return err
}
