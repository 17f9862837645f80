// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"reflect"
	"regexp"
	"strings"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// plainText is the text of an error for programs in C and Python, which know neither the names
// of Go's fields nor its sentinels.
func plainText(err error) string {
	lines := strings.Split(err.Error(), "\n")
	for i, line := range lines {
		line = optionNames(goPhrases.Replace(withoutSentinel(err, line)))
		lines[i] = strings.ReplaceAll(line, "config: ", "")
	}
	return strings.Join(lines, "\n")
}

// said are sentinels that repeat what an error's code says: the text that is left where one
// stands alone.
var said = []struct {
	err  error
	text string
}{
	{engine.ErrClosed, "it was closed"},
	{engine.ErrBusy, "it is in use"},
	{engine.ErrFull, "a limit is reached"},
	{engine.ErrBounds, "it is outside of a range or a limit"},
	{engine.ErrNotSupported, "no backend here can do this"},
	{engine.ErrPeerLost, "the peer is lost"},
	{engine.ErrTimeout, "its time is over"},
	{engine.ErrAborted, "it was aborted"},
	{engine.ErrRevoked, "the owner has ended the lease or the region"},
	{engine.ErrNoRoute, "no backend serves these two memories"},
	{engine.ErrCorrupt, "the bytes are not what they claim to be"},
	{engine.ErrBadToken, "the token is cut, altered or of another engine"},
}

// statementWords is how many words a text has at least that says what is wrong, and not only
// what was tried.
const statementWords = 4

// withoutSentinel takes the sentinel off the end of a text that says what is wrong without it.
func withoutSentinel(err error, line string) string {
	for _, s := range said {
		if !errors.Is(err, s.err) {
			continue
		}
		if line == s.err.Error() {
			return s.text
		}
		rest, found := strings.CutSuffix(line, ": "+s.err.Error())
		if !found {
			continue
		}
		last := rest[strings.LastIndex(rest, ": ")+1:]
		if !wrappedByOp(err, s.err) && len(strings.Fields(last)) >= statementWords {
			return rest
		}
		return rest + ": " + s.text
	}
	return line
}

// wrappedByOp reports whether all that an error says beside its sentinel is the operation.
func wrappedByOp(err, sentinel error) bool {
	op, ok := errors.AsType[*engine.OpError](err)
	return ok && op.Err == sentinel
}

// goPhrases are those of errors that name what C and Python have under other names.
var goPhrases = strings.NewReplacer(
	"(neither TLS, Identity nor Plaintext)", "(neither certificate nor plaintext)",
	"both Identity and Plaintext", "both certificates and plaintext",
	"Config.TLS or Identity", "certificate",
	"Route.Only", "only", "Route.Durable", "durable",
	"with Engine.Alloc", "by the engine's alloc", "Engine.Alloc", "the engine's alloc",
	"Engine.Close", "the engine's close",
	"full: poll and try again", "full",
	"Config.Budget", "sms or in_flight",
)

var (
	fieldPattern = regexp.MustCompile(`\b(?:Config\.|config: )([A-Z]\w*)|\b[A-Z]\w*[a-z][A-Z]\w*`)
	fieldNames   = configFields()
)

// configFields are the names that options of backends, and fields of sluice_config, have here, by
// those of fields of Go.
func configFields() map[string]string {
	names := byname.Fields()
	for _, config := range []reflect.Type{reflect.TypeFor[engine.Config](),
		reflect.TypeFor[cache.Config]()} {
		for _, f := range reflect.VisibleFields(config) {
			names[f.Name] = byname.OptionName(f.Name)
		}
	}
	return names
}

// optionNames writes fields of Config as the options that they are here: Config.RingBytes as
// ring_bytes.
func optionNames(text string) string {
	return fieldPattern.ReplaceAllStringFunc(text, func(found string) string {
		field := strings.TrimPrefix(strings.TrimPrefix(found, "Config."), "config: ")
		if name, ok := fieldNames[field]; ok {
			return name
		}
		return found
	})
}
