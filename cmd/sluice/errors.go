// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// classes are errors by which programs tell causes apart. Behind a text that says what is
// wrong they tell a reader nothing.
var classes = []error{
	driver.ErrNoRoute, driver.ErrNotSupported, driver.ErrReadOnly, driver.ErrBusy,
	os.ErrPermission, os.ErrExist, os.ErrNotExist, layout.ErrGeometry, bench.ErrWorkload,
	bench.ErrShape,
}

// fields are what errors of packages call in a Config, and by which flags the tool sets it.
var fields = []struct {
	name, says string
	flags      []string
}{
	{"Config.Identity", "--cert, --key and --ca", []string{"cert", "key", "ca"}},
	{"Config.Plaintext", "--plaintext", []string{"plaintext"}},
	{"Config.TLS or Identity", "--tcp-cert, --tcp-key and --tcp-ca", []string{"tcp-cert", "tcp-key",
		"tcp-ca"}},
	{"tcp: config: Listen", "--tcp-listen", []string{"tcp-listen"}},
	{"tcp: config: Listen", "--data", []string{"data"}},
	{"Config.Listen", "--tcp-listen", []string{"tcp-listen"}},
	{"Config.Listen", "--data", []string{"data"}},
	{"Config.Listen", "--listen", []string{"listen"}},
	{"Config.Memory", "--memory", []string{"memory"}},
	{"Config.Way = WayThreads", "--way threads", []string{"way"}},
	{"Config.Way", "--way", []string{"way"}},
	{"Config.Devices", "--devices", []string{"devices"}},
	{"Config.Transports", "--transports", []string{"transports"}},
}

// sentence is what the user of a command reads of an error.
func sentence(c *cobra.Command, err error) string {
	text := err.Error()
	end := suffixes(err)
	var usage *usageError
	if errors.As(err, &usage) {
		end = append(end, ": "+driver.ErrBounds.Error())
	}
	lines := strings.Split(text, "\n")
	for i := range lines {
		for range end { // in whatever order they stand
			for _, s := range end {
				lines[i] = strings.TrimSuffix(lines[i], s)
			}
		}
	}
	text = strings.Join(lines, "\n")
	for _, f := range fields {
		given := true
		for _, name := range f.flags {
			given = given && c.Flags().Lookup(name) != nil
		}
		if given {
			text = strings.ReplaceAll(text, f.name, f.says)
		}
	}
	return text
}

// suffixes returns ": " and the text of each class that a text of its own stands before. Where
// the class is all that an OpError has to say, it stays.
func suffixes(err error) (found []string) {
	for _, class := range classes {
		if err == class {
			return []string{": " + class.Error()}
		}
	}
	switch e := err.(type) {
	case *engine.OpError:
		for _, class := range classes {
			if e.Err == class {
				return nil
			}
		}
		return suffixes(e.Err)
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			found = append(found, suffixes(one)...)
		}
	case interface{ Unwrap() error }:
		return suffixes(e.Unwrap())
	}
	return found
}
