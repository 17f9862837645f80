// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// The bounds of one client, which both sides know; namesMax and bytesMax the server
// alone.
const (
	requestsMax = 64       // that run at a time; a server takes twice as many
	answersMax  = 1 << 10  // that a server sends at a time
	regionsMax  = 64       // attached
	spacesMax   = 64       // open
	pinsMax     = 1 << 10  // that have not ended
	namesMax    = 768      // namespaces that all clients of a server have open
	bytesMax    = 1 << 28  // of the messages of all requests that run
	keysMax     = 64 << 10 // of one request
	loopsMax    = 8        // of a place
	blocksMax   = 4 << 10  // of one answer to kindBlocks
	textMax     = 1 << 10  // of an error
)

// kind is what a message asks for. All numbers are little-endian; JSON is for what is rare.
type kind uint8

const (
	kindHello    kind = 1 + iota // number: the version
	kindSpace                    // rest: geometry, name; answer: number of the namespace, in JSON
	kindRegion                   // rest: token of a lease; answer: number of the region, in JSON
	kindForget                   // the region whose number is the id was revoked; no answer
	kindCancel                   // ends the request of that id; no answer of its own
	kindMatch                    // namespace, keys; answer: a Found for each
	kindLoad                     // namespace, keys, rest: a place; answer: an Outcome for each
	kindStore                    // as kindLoad
	kindPrefetch                 // namespace, keys; answer: an Outcome for each
	kindRemove                   // namespace, keys
	kindHint                     // namespace, keys, rest: a Hint; answer: a HintResult; in JSON
	kindEnvelope                 // namespace, rest: an envelope; answer: outcomes in JSON
	kindEstimate                 // namespace, keys; answer: an Estimate in JSON
	kindDrain                    // waits for the disks
	kindAnswered                 // an answer
	kindReplace                  // as kindLoad
	kindLeave                    // ends one kindSpace or kindFind of a namespace
	kindPin                      // namespace, keys, rest: ttl in ns; answer: number, outcomes
	kindUnpin                    // ends the pin whose number is the id; no answer
	kindDigest                   // rest: since; answered once there is something new, see Member
)

// What an operator asks for, beside what a client does: counts, names and keys of all namespaces,
// whoever has made them. Config.Inspect says who may, but for kindBlock, which any client may.
const (
	kindReport kind = 64 + iota // answer: a Report in JSON
	kindSpaces                  // answer: all SpaceInfo in JSON
	kindFind                    // rest: digest; answer: number of the namespace, in JSON
	kindBlocks                  // namespace, rest: where to begin; answer: where to go on, blocks
	kindBlock                   // namespace, one key; answer: a blockText in JSON
)

const version = 3

var le = binary.LittleEndian

var errGarbled = fmt.Errorf("garbled message: %w", engine.ErrCorrupt)

// waits reports whether a request may take long: a client whose context ends sends kindCancel, and
// waits for the answer all the same.
func (k kind) waits() bool {
	return k == kindLoad || k == kindStore || k == kindReplace || k == kindPrefetch ||
		k == kindDrain || k == kindDigest
}

// A message is a kind, an id that the client chose, and for a request the body below, for an answer
// that of answer.
const headBytes = 1 + 8

func head(what kind, id uint64) []byte { return le.AppendUint64([]byte{byte(what)}, id) }

// readHead reads a head; one of no kind is garbled.
func readHead(p []byte) (what kind, id uint64, body []byte) {
	if len(p) < headBytes {
		return 0, 0, nil
	}
	return kind(p[0]), le.Uint64(p[1:]), p[headBytes:]
}

// request is the body of each request: a number, how many keys, those, and what else there is.
type request struct {
	number uint16 // of a namespace, or as kind says
	keys   []cache.Key
	rest   []byte

	region *engine.Region // of a client's place; no part of the message
}

func (q *request) append(p []byte) []byte {
	p = slices.Grow(p, 2+4+len(q.keys)*len(cache.Key{})+len(q.rest))
	p = le.AppendUint32(le.AppendUint16(p, q.number), uint32(len(q.keys)))
	for k := range q.keys {
		p = append(p, q.keys[k][:]...)
	}
	return append(p, q.rest...)
}

func readRequest(p []byte) (q request, err error) {
	const numbers, keyBytes = 2 + 4, len(cache.Key{})
	if len(p) < numbers {
		return q, errGarbled
	}
	n := le.Uint32(p[2:])
	if n > keysMax || len(p)-numbers < int(n)*keyBytes {
		return q, errGarbled
	}
	q = request{number: le.Uint16(p), keys: make([]cache.Key, n), rest: p[numbers:]}
	for k := range q.keys {
		q.rest = q.rest[copy(q.keys[k][:], q.rest):]
	}
	return q, nil
}

// placeHead is what a place begins with; its loops, its slots and its segments follow.
type placeHead struct {
	Region            uint16
	Base, Stride, Run uint64
	Loops             uint8
	Copy              bool
}

func appendPlace(p []byte, region uint16, at *Place) []byte {
	p = appendFixed(p, placeHead{region, at.Base, at.Stride, at.Run, uint8(len(at.Loops)),
		at.Copy})
	return appendFixed(appendFixed(appendFixed(p, at.Loops), at.Slots), at.Segments)
}

// readPlace reads a place with a slot for each key, and the segments of those.
func readPlace(p []byte, keys int) (region uint16, at cache.Place, of []Segment, err error) {
	var h placeHead
	if p, err = readFixed(p, &h); err != nil || h.Loops > loopsMax {
		return 0, at, nil, errGarbled
	}
	at = cache.Place{Base: h.Base, Stride: h.Stride, Run: h.Run, Copy: h.Copy,
		Loops: make([]cache.Axis, h.Loops), Slots: make([]uint32, keys)}
	if p, err = readFixed(p, at.Loops); err == nil {
		p, err = readFixed(p, at.Slots)
	}
	if err == nil {
		of = make([]Segment, min(keys, len(p)/segmentBytes))
		p, err = readFixed(p, of)
	}
	if len(p) > 0 || !areSegments(of, keys) {
		err = errGarbled
	}
	return h.Region, at, of, err
}

// appendFixed writes a value of a type with a fixed size, or a list of such.
func appendFixed(p []byte, v any) []byte {
	p, _ = binary.Append(p, le, v) // it never fails for the types here
	return p
}

// readFixed reads what appendFixed has written, and returns what is left.
func readFixed(p []byte, v any) ([]byte, error) {
	n, err := binary.Decode(p, le, v)
	if err != nil {
		return nil, errGarbled
	}
	return p[n:], nil
}

// errs are the errors that a client knows by errors.Is; an answer has their place here, from
// errKnown on.
var errs = [...]error{engine.ErrUnproven, engine.ErrClosed, engine.ErrBusy, engine.ErrBounds,
	cache.ErrNoRoom, engine.ErrCorrupt, engine.ErrNotSupported, engine.ErrVersion,
	os.ErrPermission}

const (
	errNone = iota
	errOther
	errKnown
)

// answer is what a server says to a request: what became of it, in a number and a text, and a body.
func answer(id uint64, err error, body []byte) []byte {
	code, text := errNone, ""
	if err != nil {
		code, text = errOther, err.Error()
		text = text[:min(len(text), textMax)]
		for k, known := range errs {
			if errors.Is(err, known) {
				code = errKnown + k
				break
			}
		}
	}
	p := append(head(kindAnswered, id), byte(code))
	p = append(le.AppendUint16(p, uint16(len(text))), text...)
	return append(p, body...)
}

// readAnswer reads what follows the id of an answer.
func readAnswer(p []byte) (body []byte, err error) {
	if len(p) < 3 || len(p) < 3+int(le.Uint16(p[1:])) || int(p[0]) >= errKnown+len(errs) {
		return nil, errGarbled
	}
	code, text, body := int(p[0]), string(p[3:][:le.Uint16(p[1:])]), p[3+int(le.Uint16(p[1:])):]
	switch {
	case code == errNone:
		return body, nil
	case code == errOther:
		return body, &answeredError{text, nil}
	}
	return body, &answeredError{text, errs[code-errKnown]}
}

// answeredError is what the server answered: its text, which names the cause, and the known error
// that it is, or nil.
type answeredError struct {
	text  string
	class error
}

func (e *answeredError) Error() string { return e.text }
func (e *answeredError) Unwrap() error { return e.class }
