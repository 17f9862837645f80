// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/sluicehq/sluice/internal/figures"
)

// Error is an error in a backend's name or options. Its text lists what is valid.
type Error struct{ text string }

// Error implements error.
func (e *Error) Error() string { return e.text }

// Errorf returns an *Error.
func Errorf(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// Split parses NAME or NAME:OPTION=VALUE,OPTION=VALUE. Text after a comma that has no "=" belongs
// to the value before the comma, as in devices=rxe0,rxe2. A comma after a backslash is part of the
// value, for paths with a comma and "=". An option with an empty value is an *Error, since it is
// most likely a script's variable that is not set.
func Split(spec string) (name string, options []string, err error) {
	name, rest, found := strings.Cut(spec, ":")
	if name == "" || found && rest == "" {
		return "", nil, Errorf("%q: want a name, or NAME:OPTION=VALUE,OPTION=VALUE", spec)
	}
	if !found {
		return name, nil, nil
	}
	const comma = "\x00" // which no argument of a command and no path has
	for _, piece := range strings.Split(strings.ReplaceAll(rest, `\,`, comma), ",") {
		if strings.Contains(piece, "=") || len(options) == 0 {
			options = append(options, piece)
		} else {
			options[len(options)-1] += "," + piece
		}
	}
	for i, w := range options {
		if option, found := strings.CutSuffix(w, "="); found {
			return "", nil, Errorf("option %s is empty: give it a value, or leave it out", option)
		}
		options[i] = strings.ReplaceAll(w, comma, ",")
	}
	return name, options, nil
}

// SetOptions sets exported fields of the struct that config points to: "ring_bytes=65536" sets
// RingBytes. Durations are written as "50ms", sizes may be written as "8MiB". A list of strings
// takes one element per word; a list of numbers takes several, separated by commas. Errors are
// *Error.
func SetOptions(config any, options []string) error {
	c := reflect.ValueOf(config).Elem()
	for _, w := range options {
		name, value, found := strings.Cut(w, "=")
		if !found {
			return Errorf("option %q: write it as name=value", w)
		}
		field, names := fieldOf(c, name)
		if !field.IsValid() {
			return Errorf("option %q does not exist: there are %s", name, strings.Join(names, ", "))
		}
		if err := setters[field.Type()](field, value); err != nil {
			return Errorf("option %s: %v", w, err)
		}
	}
	return nil
}

// fieldOf returns the field of an option, and the names of all options.
func fieldOf(config reflect.Value, name string) (field reflect.Value, names []string) {
	for _, f := range reflect.VisibleFields(config.Type()) {
		if f.Anonymous || !f.IsExported() || setters[f.Type] == nil {
			continue
		}
		names = append(names, OptionName(f.Name))
		if OptionName(f.Name) == name {
			field = config.FieldByIndex(f.Index)
		}
	}
	return field, names
}

// OptionName returns the option name of a field: ring_bytes for RingBytes, mtu for MTU,
// bytes_a_day for BytesADay.
func OptionName(field string) string {
	var b strings.Builder
	lower := func(at int) bool {
		return at >= 0 && at < len(field) && unicode.IsLower(rune(field[at]))
	}
	for i, r := range field {
		if unicode.IsUpper(r) && (lower(i-1) || lower(i-2) && lower(i+1)) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// setters parse a value into a field, by the field's type.
var setters = map[reflect.Type]func(field reflect.Value, value string) error{
	reflect.TypeFor[string](): func(f reflect.Value, v string) error {
		f.SetString(v)
		return nil
	},
	reflect.TypeFor[[]string](): func(f reflect.Value, v string) error {
		f.Set(reflect.Append(f, reflect.ValueOf(v)))
		return nil
	},
	reflect.TypeFor[time.Duration](): parsed("a time such as 50ms or 5s", time.ParseDuration),
	reflect.TypeFor[bool]():          parsed("true or false", strconv.ParseBool),
	reflect.TypeFor[int](): parsed("a whole number, or a size such as 64KiB", func(v string) (int,
		error) {
		n, err := sizeOrCount(v)
		if err != nil || n > math.MaxInt {
			return strconv.Atoi(v) // which may be negative
		}
		return int(n), nil
	}),
	reflect.TypeFor[uint64](): parsed("a number from 0, or a size such as 64KiB", func(v string) (
		uint64, error) {
		return sizeOrCount(v)
	}),
	reflect.TypeFor[[]int](): func(f reflect.Value, v string) error {
		for _, one := range strings.Split(v, ",") {
			n, err := strconv.Atoi(one)
			if err != nil {
				return fmt.Errorf("want whole numbers with commas between")
			}
			f.Set(reflect.Append(f, reflect.ValueOf(n)))
		}
		return nil
	},
}

// sizeOrCount parses a whole number, or a size with a unit. A fraction needs a unit.
func sizeOrCount(v string) (uint64, error) {
	if strings.TrimRight(v, "0123456789") == v { // a unit stands at the end
		return figures.ParseSize(v)
	}
	return strconv.ParseUint(v, 10, 64)
}

// parsed returns a setter that parses a value; want describes valid values for the error.
func parsed[T any](want string, parse func(string) (T, error)) func(reflect.Value, string) error {
	return func(field reflect.Value, value string) error {
		v, err := parse(value)
		if err != nil {
			return fmt.Errorf("want %s", want)
		}
		field.Set(reflect.ValueOf(v))
		return nil
	}
}
