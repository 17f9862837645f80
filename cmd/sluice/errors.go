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
)

// classes are errors by which programs tell causes apart. Behind a text that says what is
// wrong they tell a reader nothing.
var classes = []error{
	driver.ErrNoRoute, driver.ErrNotSupported, driver.ErrReadOnly, driver.ErrBusy, driver.ErrBounds,
	os.ErrPermission, os.ErrExist, os.ErrNotExist, layout.ErrGeometry, bench.ErrShape,
	engine.ErrCorrupt,
}

// fieldPattern matches the name of a Config's field in the text of an error.
var fieldPattern = regexp.MustCompile(`\b(?:Config\.|config: )([A-Z]\w*)`)

// optionNames replaces the names of Config fields in a text by the names of their options.
func optionNames(text string) string {
	fields := byname.Fields()
	return fieldPattern.ReplaceAllStringFunc(text, func(found string) string {
		if name, ok := fields[fieldPattern.FindStringSubmatch(found)[1]]; ok {
			return "option " + name
		}
		return found
	})
}

// statementWords is how many words a text has at least that says what is wrong, and not only what
// was tried.
const statementWords = 4

// sentence returns the text of an error as the tool shows it to its user.
func sentence(err error) string {
	lines := strings.Split(err.Error(), "\n")
	op, isOp := errors.AsType[*engine.OpError](err)
	for i, line := range lines {
		for _, class := range classes {
			if isOp && op.Err == class { // which is all that it has to say
				continue
			}
			rest, found := strings.CutSuffix(line, ": "+class.Error())
			last := rest[strings.LastIndex(rest, ": ")+1:]
			if found && errors.Is(err, class) && len(strings.Fields(last)) >= statementWords {
				line = rest
			}
		}
		lines[i] = line
	}
	return optionNames(strings.Join(lines, "\n"))
}
