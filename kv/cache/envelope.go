// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// ActionOutcome is the result of one action of an envelope.
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
	valuesMax   = hintKeysMax + 16*actionsMax // of hashes, and of all other fields
)

// actions are those that the cache knows, each in version 1.0.
var actions = map[string]HintKind{
	"kv.fetch":       HintPrefetch, // of blocks that this node has: no other node is asked
	"kv.prefetch":    HintPrefetch,
	"kv.retain":      HintRetain,
	"kv.release":     HintRelease,
	"kv.demote":      HintDemote,
	"kv.session_end": HintSessionEnd,
}

const actionVersion = "1.0"

// HintEnvelope heeds the JSON of a KvHintsEnvelope, as routers attach it to requests, and serving
// engines pass it on. A payload names blocks by block_hashes, each of which is a number
// or its decimal digits (eight bytes, big-endian), or the hex digits of 16 or 32 bytes, or of any
// number of bytes behind 0x; the Key of one of other than 16 bytes is KeyOf of it. kv.retain has
// ttl_seconds. Actions are independent: one that is unknown, or no good, is told by its outcome.
// The error is of data that is no envelope, or one of more than 4 MiB or about 64 Ki hashes.
func (n *Namespace) HintEnvelope(data []byte) ([]ActionOutcome, error) {
	e, err := readEnvelope(data)
	if err != nil {
		return nil, err
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

// envelope is what is read of a KvHintsEnvelope: protocol_version and message_id are the sender's,
// as each action has its own.
type envelope struct {
	Actions []struct {
		ID      string          `json:"action_id"`
		Type    string          `json:"action_type"`
		Version string          `json:"action_version"`
		Payload json.RawMessage `json:"payload"`
	} `json:"actions"`
}

func readEnvelope(data []byte) (e envelope, err error) {
	// Look at what it would take to parse it first: a value of two bytes takes a hundred then.
	values := bytes.Count(data, []byte(","))
	if len(data) > envelopeMax || values > valuesMax {
		return e, fmt.Errorf("an envelope of %d bytes and %d values, at most %d and %d: %w",
			len(data), values, envelopeMax, valuesMax, engine.ErrBounds)
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return e, fmt.Errorf("hints: %w: %w", engine.ErrCorrupt, inWords(err))
	}
	if len(e.Actions) > actionsMax {
		return e, fmt.Errorf("an envelope of %d actions, at most %d: %w", len(e.Actions),
			actionsMax, engine.ErrBounds)
	}
	return e, nil
}

// Fetch is what a router says of a source: that it has blocks.
type Fetch struct {
	Source string // source_control_endpoint, such as tcp://HOST:PORT
	Keys   []Key
}

// Fetches lists what the kv.fetch of an envelope say. One that is no good says nothing here:
// HintEnvelope tells why.
func Fetches(data []byte) (list []Fetch) {
	e, err := readEnvelope(data)
	if err != nil {
		return nil
	}
	for _, a := range e.Actions {
		var p struct {
			Source string      `json:"source_control_endpoint"`
			Hashes []blockHash `json:"block_hashes"`
		}
		if a.Type == "kv.fetch" && a.Version == actionVersion &&
			json.Unmarshal(a.Payload, &p) == nil && p.Source != "" {
			list = append(list, Fetch{p.Source, hashKeys(p.Hashes)})
		}
	}
	return list
}

func hashKeys(hashes []blockHash) []Key {
	keys := make([]Key, len(hashes))
	for k := range keys {
		keys[k] = Key(hashes[k])
	}
	return keys
}

func (n *Namespace) act(kind HintKind, payload []byte) (HintResult, error) {
	var p struct {
		Hashes []blockHash `json:"block_hashes"`
		TTL    float64     `json:"ttl_seconds"`
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		return HintResult{}, fmt.Errorf("payload: %w", inWords(err))
	}
	if len(p.Hashes) == 0 {
		return HintResult{}, errors.New("payload: no block_hashes")
	}
	h := Hint{Kind: kind}
	if kind == HintRetain {
		if !(p.TTL > 0 && p.TTL <= retainMax.Seconds()) {
			return HintResult{}, fmt.Errorf("payload: ttl_seconds %v, above 0 and up to %v at a "+
				"time", p.TTL, retainMax.Seconds())
		}
		h.For = time.Duration(p.TTL * float64(time.Second))
	}
	return n.Hint(hashKeys(p.Hashes), h)
}

// inWords says what json.Unmarshal found without the names of types here.
func inWords(err error) error {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s is of type %s, which is not the one that docs/cache.md shows",
			cmp.Or(e.Field, "the envelope"), e.Value)
	}
	return err
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
