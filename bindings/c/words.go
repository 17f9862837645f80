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
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/ring"
	"github.com/sluicehq/sluice/kv/sparse"
)

// plainText returns the text of an error for programs in C and Python. They know neither the names
// of Go's fields nor its sentinel errors: they get a code beside the text. So plainText
//
//   - drops a sentinel at the end of a line, or writes it in plain words (withoutSentinel),
//   - replaces phrases of Go by those of the C API (goPhrases),
//   - writes fields of Config as options: Config.RingBytes as ring_bytes (optionNames).
func plainText(err error) string {
	lines := strings.Split(err.Error(), "\n")
	for i, line := range lines {
		line = optionNames(goPhrases.Replace(withoutSentinel(err, line)))
		lines[i] = strings.ReplaceAll(line, "config: ", "")
	}
	return strings.Join(lines, "\n")
}

// sentinels are the errors that have a code of their own in C. text takes the place of a sentinel
// where the rest of the line does not say what is wrong.
var sentinels = []struct {
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

// explainsMin is the number of words from which on a text before a sentinel is taken to say what is
// wrong, and not only what was tried ("open region").
const explainsMin = 4

// withoutSentinel removes the sentinel at the end of a line of an error's text, if the words before
// it say what is wrong. Otherwise it writes the sentinel's text in its place.
func withoutSentinel(err error, line string) string {
	for _, s := range sentinels {
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
		if !onlyOpWraps(err, s.err) && len(strings.Fields(last)) >= explainsMin {
			return rest
		}
		return rest + ": " + s.text
	}
	return line
}

// onlyOpWraps reports whether an OpError wraps the sentinel directly: the text before the sentinel
// then is the operation alone.
func onlyOpWraps(err, sentinel error) bool {
	op, ok := errors.AsType[*engine.OpError](err)
	return ok && op.Err == sentinel
}

// goPhrases replaces phrases of Go's errors for things that have other names in C and Python.
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

// configFields maps the names of Config fields in Go to those of the C API: options of backends,
// and fields of sluice_config.
func configFields() map[string]string {
	names := byname.Fields()
	for _, config := range []reflect.Type{reflect.TypeFor[engine.Config](),
		reflect.TypeFor[cache.Config](), reflect.TypeFor[handoff.Limits](),
		reflect.TypeFor[ring.Config](), reflect.TypeFor[sparse.Config]()} {
		for _, f := range reflect.VisibleFields(config) {
			names[f.Name] = byname.OptionName(f.Name)
		}
	}
	return names
}

// optionNames replaces names of Config fields in a text: Config.RingBytes by ring_bytes.
func optionNames(text string) string {
	return fieldPattern.ReplaceAllStringFunc(text, func(found string) string {
		field := strings.TrimPrefix(strings.TrimPrefix(found, "Config."), "config: ")
		if name, ok := fieldNames[field]; ok {
			return name
		}
		return found
	})
}
