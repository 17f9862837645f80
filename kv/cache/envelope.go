// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// ActionOutcome says what became of one action of an envelope.
type ActionOutcome struct {
	ActionID string       `json:"action_id"`
	Status   ActionStatus `json:"status"`
	Reason   string       `json:"reason,omitempty"`
	HintResult
}

// ActionStatus is a word of the field for that.
type ActionStatus string

// The statuses.
const (
	ActionApplied     ActionStatus = "applied"     // to some blocks, or to none as all are missing
	ActionRejected    ActionStatus = "rejected"    // its payload is no good, or a budget is used up
	ActionUnsupported ActionStatus = "unsupported" // the cache has no such action or version
)

const (
	envelopeMax = 4 << 20
	actionsMax  = 256
)

// actions are those that the cache knows, each in version 1.0.
var actions = map[string]HintKind{
	"kv.fetch":       HintPrefetch, // of what this node has: no other one is asked
	"kv.prefetch":    HintPrefetch,
	"kv.retain":      HintRetain,
	"kv.release":     HintRelease,
	"kv.demote":      HintDemote,
	"kv.session_end": HintSessionEnd,
}

const actionVersion = "1.0"

// HintEnvelope heeds a KvHintsEnvelope, as serving engines and routers attach it to requests: the
// JSON of it, or the MessagePack. A payload names blocks by block_hashes, each of which is a number
// or its decimal digits (eight bytes, big-endian), or the hex digits of 16 or 32 bytes, or of any
// number of bytes behind 0x; the Key of one of other than 16 bytes is KeyOf of it. kv.retain has
// ttl_seconds. Actions are independent: one that is unknown, or no good, is told by its outcome.
// The error is of data that is no envelope.
func (n *Namespace) HintEnvelope(data []byte) ([]ActionOutcome, error) {
	if len(data) > envelopeMax {
		return nil, fmt.Errorf("an envelope of %d bytes, at most %d: %w", len(data), envelopeMax,
			engine.ErrBounds)
	}
	if text := bytes.TrimLeft(data, " \t\r\n"); len(text) == 0 || text[0] != '{' {
		m := msgpack{p: data}
		m.value(0)
		if m.bad || len(m.p) > 0 {
			return nil, fmt.Errorf("hints are neither JSON nor MessagePack: %w", engine.ErrCorrupt)
		}
		data = m.json
	}
	var e struct {
		ProtocolVersion string `json:"protocol_version"`
		MessageID       string `json:"message_id"`
		Actions         []struct {
			ID      string          `json:"action_id"`
			Type    string          `json:"action_type"`
			Version string          `json:"action_version"`
			Payload json.RawMessage `json:"payload"`
		} `json:"actions"`
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("hints: %w: %w", engine.ErrCorrupt, err)
	}
	if len(e.Actions) > actionsMax {
		return nil, fmt.Errorf("an envelope of %d actions, at most %d: %w", len(e.Actions),
			actionsMax, engine.ErrBounds)
	}
	list := make([]ActionOutcome, len(e.Actions))
	for k, a := range e.Actions {
		o := &list[k]
		o.ActionID, o.Status = a.ID, ActionUnsupported
		kind, known := actions[a.Type]
		switch {
		case !known:
			o.Reason = fmt.Sprintf("no action %q", a.Type)
		case a.Version != actionVersion:
			o.Reason = fmt.Sprintf("version %q of %s, known is %s", a.Version, a.Type,
				actionVersion)
		default:
			o.Status = ActionApplied
			var err error
			if o.HintResult, err = n.act(kind, a.Payload); err != nil {
				o.Reason = err.Error()
				if o.Applied == 0 {
					o.Status = ActionRejected
				}
			}
		}
	}
	return list, nil
}

func (n *Namespace) act(kind HintKind, payload []byte) (HintResult, error) {
	var p struct {
		Hashes []blockHash `json:"block_hashes"`
		TTL    float64     `json:"ttl_seconds"`
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		return HintResult{}, fmt.Errorf("payload: %w", err)
	}
	if len(p.Hashes) == 0 {
		return HintResult{}, errors.New("payload: no block_hashes")
	}
	h := Hint{Kind: kind}
	if kind == HintRetain {
		if !(p.TTL > 0 && p.TTL <= retainMax.Seconds()) {
			return HintResult{}, fmt.Errorf("payload: ttl_seconds %v, above 0 and up to %v", p.TTL,
				retainMax.Seconds())
		}
		h.For = time.Duration(p.TTL * float64(time.Second))
	}
	keys := make([]Key, len(p.Hashes))
	for k := range keys {
		keys[k] = Key(p.Hashes[k])
	}
	return n.Hint(keys, h)
}

// blockHash is the key of a hash in a payload.
type blockHash Key

// UnmarshalJSON reads a number, or a string: see HintEnvelope.
func (b *blockHash) UnmarshalJSON(p []byte) error {
	text := string(p)
	if len(text) > 1 && text[0] == '"' {
		text = text[1 : len(text)-1]
	}
	var hash []byte
	var err error
	switch {
	case len(text) > 2 && text[:2] == "0x":
		hash, err = hex.DecodeString(text[2:])
	case len(text) == 32 || len(text) == 64:
		hash, err = hex.DecodeString(text)
	default:
		v, no := strconv.ParseUint(text, 10, 64)
		if no != nil { // some engines have signed ones
			var signed int64
			signed, err = strconv.ParseInt(text, 10, 64)
			v = uint64(signed)
		}
		hash = binary.BigEndian.AppendUint64(nil, v)
	}
	if err != nil {
		return fmt.Errorf("block hash %.80q: %w", text, err)
	}
	if *b = blockHash(KeyOf(hash)); len(hash) == len(b) {
		*b = blockHash(hash)
	}
	return nil
}

// msgpack writes a value of MessagePack as JSON: those that JSON has, and bytes as hex.
type msgpack struct {
	p    []byte
	json []byte
	bad  bool
}

const msgpackDepthMax = 16

func (m *msgpack) bytes(n uint64) []byte {
	if m.bad || n > uint64(len(m.p)) {
		m.bad = true
		return nil
	}
	p := m.p[:n]
	m.p = m.p[n:]
	return p
}

func (m *msgpack) uint(n int) (v uint64) {
	for _, b := range m.bytes(uint64(n)) {
		v = v<<8 | uint64(b)
	}
	return v
}

func (m *msgpack) value(depth int) {
	head := m.uint(1)
	if m.bad || depth > msgpackDepthMax {
		m.bad = true
		return
	}
	add := func(s string) { m.json = append(m.json, s...) }
	text := func(n uint64) {
		p, _ := json.Marshal(string(m.bytes(n))) // never fails
		m.json = append(m.json, p...)
	}
	list := func(n uint64, ends string, pair bool) {
		add(ends[:1])
		for k := uint64(0); k < n && !m.bad; k++ {
			if k > 0 {
				add(",")
			}
			if pair {
				begin := len(m.json)
				m.value(depth + 1)
				m.bad = m.bad || m.json[begin] != '"'
				add(":")
			}
			m.value(depth + 1)
		}
		add(ends[1:])
	}
	switch {
	case head <= 0x7f:
		m.json = strconv.AppendUint(m.json, head, 10)
	case head >= 0xe0:
		m.json = strconv.AppendInt(m.json, int64(int8(head)), 10)
	case head <= 0x8f:
		list(head&15, "{}", true)
	case head <= 0x9f:
		list(head&15, "[]", false)
	case head <= 0xbf:
		text(head & 31)
	case head == 0xc0:
		add("null")
	case head == 0xc2:
		add("false")
	case head == 0xc3:
		add("true")
	case head >= 0xc4 && head <= 0xc6:
		add(`"0x` + hex.EncodeToString(m.bytes(m.uint(1<<(head-0xc4)))) + `"`)
	case head == 0xca, head == 0xcb:
		f := math.Float64frombits(m.uint(8))
		if head == 0xca {
			f = float64(math.Float32frombits(uint32(m.uint(4))))
		}
		p, err := json.Marshal(f)
		m.bad = m.bad || err != nil
		m.json = append(m.json, p...)
	case head >= 0xcc && head <= 0xcf:
		m.json = strconv.AppendUint(m.json, m.uint(1<<(head-0xcc)), 10)
	case head >= 0xd0 && head <= 0xd3:
		n := 1 << (head - 0xd0)
		shift := 64 - 8*n
		m.json = strconv.AppendInt(m.json, int64(m.uint(n)<<shift)>>shift, 10)
	case head >= 0xd9 && head <= 0xdb:
		text(m.uint(1 << (head - 0xd9)))
	case head == 0xdc, head == 0xdd:
		list(m.uint(2<<(head-0xdc)), "[]", false)
	case head == 0xde, head == 0xdf:
		list(m.uint(2<<(head-0xde)), "{}", true)
	default: // extensions
		m.bad = true
	}
}
