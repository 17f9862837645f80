// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"regexp"
	"strings"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/weights"
)

// classes are errors by which programs tell causes apart. Behind a text that says what is
// wrong they tell a reader nothing.
var classes = []error{
	driver.ErrNoRoute, driver.ErrNotSupported, driver.ErrReadOnly, driver.ErrBusy,
	os.ErrPermission, os.ErrExist, os.ErrNotExist, layout.ErrGeometry, bench.ErrShape,
}

// fieldPattern finds what errors of packages call a field of a Config.
var fieldPattern = regexp.MustCompile(`\b(?:Config\.|config: )([A-Z]\w*)`)

// optionNames has a text speak of options where it speaks of fields of a backend's Config.
func optionNames(text string) string {
	fields := byname.Fields()
	return fieldPattern.ReplaceAllStringFunc(text, func(found string) string {
		if name, ok := fields[fieldPattern.FindStringSubmatch(found)[1]]; ok {
			return "option " + name
		}
		return found
	})
}

// sentence is what the user of a command reads of an error.
func sentence(err error) string {
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
	return optionNames(strings.Join(lines, "\n"))
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
	case *weights.FileError: // which says what is wrong with the file
		return append(suffixes(e.Err), ": "+engine.ErrCorrupt.Error())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			found = append(found, suffixes(one)...)
		}
	case interface{ Unwrap() error }:
		return suffixes(e.Unwrap())
	}
	return found
}
