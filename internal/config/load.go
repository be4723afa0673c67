// Package config fills a program's settings from flags, environment, file and
// defaults, in that order of precedence, and says everything that is wrong with
// them at once. It is where viper is used; only the commands import it.
//
// A setting has one name everywhere: the key in the file (log.level), the
// environment variable made of it (RDTARGET_LOG_LEVEL), the flag that a command
// gives it (--log-level), and the word in messages. A key or a variable with the
// program's prefix that nobody knows is an error: a typing mistake must not
// silently mean the default.
package config

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"rdblk/internal/cli"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// A Source says where settings come from.
type Source struct {
	// Prefix of environment variables, with the underscore: "RDTARGET_".
	Prefix  string
	Environ []string
	// File is a YAML, JSON or TOML file, "" for none.
	File string
	// Flags were parsed before; Keys names the setting of each flag that is one.
	// Only flags that were given count.
	Flags *pflag.FlagSet
	Keys  map[string]string
	// Set overrides everything, also flags: settings that came as arguments.
	Set map[string]any
}

// A Validator checks itself and returns all problems joined, each with the key in front.
type Validator interface{ Validate() error }

// Load fills dst, which holds the defaults, from src. The error lists all problems.
func Load(dst Validator, src Source) error {
	v := viper.New()
	for k, val := range flatten(dst) {
		v.SetDefault(k, val)
	}
	all := Keys(dst)

	var errs []error
	for _, kv := range src.Environ {
		name, val, _ := strings.Cut(kv, "=")
		key, ok := strings.CutPrefix(name, src.Prefix)
		if !ok || src.Prefix == "" || key == "CONFIG" { // CONFIG names the file; the command has read it
			continue
		}
		i := slices.IndexFunc(all, func(k string) bool { return EnvName("", k) == key })
		if i < 0 {
			var names []string
			for _, k := range all {
				names = append(names, EnvName("", k))
			}
			errs = append(errs, fmt.Errorf("environment variable %s: no such setting%s", name, cli.DidYouMean(src.Prefix, key, names)))
			continue
		}
		if val != "" { // set to nothing is not set, as usual
			v.Set(all[i], val)
		}
	}

	if src.File != "" {
		fv := viper.New()
		fv.SetConfigFile(src.File)
		if f, err := openFile(src.File); err != nil {
			errs = append(errs, fmt.Errorf("read configuration %s: %w%s", src.File, cli.Plain(err), fileAdvice(err)))
		} else if f.Close(); !slices.Contains(fileTypes, strings.ToLower(filepath.Ext(src.File))) {
			errs = append(errs, fmt.Errorf("read configuration %s: the ending of its name says what is in it, and is none of %s", src.File, strings.Join(fileTypes, ", ")))
		} else if err := fv.ReadInConfig(); err != nil {
			errs = append(errs, fmt.Errorf("read configuration %s: %s", src.File, syntax(err)))
		} else if err := v.MergeConfigMap(fv.AllSettings()); err != nil {
			errs = append(errs, fmt.Errorf("read configuration %s: %w", src.File, err))
		}
	}

	for flag, key := range src.Keys {
		f := src.Flags.Lookup(flag)
		if f == nil || !slices.Contains(all, key) {
			panic(fmt.Sprintf("config: flag %q for setting %q: one of them does not exist", flag, key))
		}
		if f.Changed {
			v.Set(key, flagValue(f))
		}
	}
	for key, val := range src.Set {
		v.Set(key, val)
	}

	dec, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result:           dst,
		ErrorUnused:      true,
		WeaklyTypedInput: true,
		ZeroFields:       true,
		TagName:          tag,
		DecodeHook:       mapstructure.ComposeDecodeHookFunc(durationHook, numberHook, stringHook, textHook, listHook),
	})
	if err != nil {
		return err
	}
	if err := dec.Decode(v.AllSettings()); err != nil {
		errs = append(errs, tidy(err, src.File, dst)...)
	}
	if err := dst.Validate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

const tag = "mapstructure"

// Keys lists the settings of a struct, sorted: "listen", "log.level".
func Keys(s any) []string {
	var ks []string
	for k := range flatten(s) {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
}

// EnvName is the environment variable of a setting.
func EnvName(prefix, key string) string {
	return prefix + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// Values lists key and value of every setting of a struct.
func Values(s any) map[string]any { return flatten(s) }

// flatten lists key and value of every leaf of a settings struct. Slices, also of structs, are leaves.
func flatten(s any) map[string]any {
	out := map[string]any{}
	var walk func(prefix string, v reflect.Value)
	walk = func(prefix string, v reflect.Value) {
		t := v.Type()
		for i := range t.NumField() {
			name := t.Field(i).Tag.Get(tag)
			if name == "" || name == "-" {
				continue
			}
			if f := v.Field(i); f.Kind() == reflect.Struct {
				walk(prefix+name+".", f)
			} else {
				out[prefix+name] = f.Interface()
			}
		}
	}
	walk("", reflect.Indirect(reflect.ValueOf(s)))
	return out
}

func flagValue(f *pflag.Flag) any {
	if s, ok := f.Value.(pflag.SliceValue); ok {
		return s.GetSlice()
	}
	return f.Value.String()
}

// fileTypes are the endings of files that can be read.
var fileTypes = []string{".yaml", ".yml", ".json", ".toml"}

// syntax is what is wrong with a file, on one line.
func syntax(err error) string {
	s := err.Error()
	var p viper.ConfigParseError
	if errors.As(err, &p) {
		s = p.Unwrap().Error()
	}
	s = strings.Join(strings.Fields(s), " ")
	if strings.Contains(s, "cannot start any token") {
		s += " (indent with spaces, not with tabs; put a word that begins with @ or % into quotes)"
	}
	return s
}

// openFile opens a file to be read, which a directory is not.
func openFile(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err == nil && st.IsDir() {
		f.Close()
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EISDIR}
	}
	return f, nil
}

func fileAdvice(err error) string {
	switch {
	case errors.Is(err, syscall.EISDIR):
		return " (name the file in it)"
	case errors.Is(err, os.ErrNotExist):
		return " (is its name right? configs/ has a sample)"
	case errors.Is(err, os.ErrPermission):
		return " (this user must be able to read it)"
	}
	return ""
}

// tidy takes the decoder's errors apart and puts them in our words. file is where unknown keys come from:
// those of the environment and of flags have been looked up before.
func tidy(err error, file string, dst any) []error {
	var list []error
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) {
		case interface{ Unwrap() []error }:
			for _, x := range e.Unwrap() {
				walk(x)
			}
		default:
			list = append(list, oneDecodeError(err, file, dst))
		}
	}
	for {
		var multi interface{ Unwrap() []error }
		if errors.As(err, &multi) {
			walk(multi.(error))
			return list
		}
		return append(list, oneDecodeError(err, file, dst))
	}
}

func oneDecodeError(err error, file string, dst any) error {
	s := err.Error()
	s = strings.TrimPrefix(s, "decoding failed due to the following error(s):\n\n")
	if where, list, ok := strings.Cut(s, "has invalid keys: "); ok {
		where = strings.Trim(strings.TrimSpace(where), "'")
		known := keysBelow(dst, where)
		var es []error
		for k := range strings.SplitSeq(list, ", ") {
			hint := cli.DidYouMean("", k, known)
			if where != "" {
				k = where + "." + k
			}
			es = append(es, fmt.Errorf("%s: no such setting in %s%s", k, file, hint))
		}
		return errors.Join(es...)
	}
	var key string
	var decode *mapstructure.DecodeError
	if errors.As(err, &decode) {
		key = decode.Name()
	}
	var parse *mapstructure.ParseError
	var convert *mapstructure.UnconvertibleTypeError
	switch {
	case errors.As(err, &parse):
		return fmt.Errorf("%s: %s", key, cli.Misfit(kindName(parse.Expected.Type()), fmt.Sprint(parse.Value)))
	case errors.As(err, &convert):
		return fmt.Errorf("%s: %s", key, misplaced(convert.Expected.Type(), convert.Value))
	}
	if strings.HasPrefix(s, "'") {
		if key, rest, ok := strings.Cut(s[1:], "'"); ok {
			rest = strings.TrimSpace(rest)
			if strings.HasPrefix(rest, "expected a map") {
				rest = "it is a group of settings, write them below it, indented"
			}
			return fmt.Errorf("%s: %s", key, rest)
		}
	}
	return err
}

// kindName is what package pflag calls a type.
func kindName(t reflect.Type) string {
	if t == durationType {
		return "duration"
	}
	if t == reflect.TypeFor[Size]() {
		return "size"
	}
	return t.Kind().String()
}

// misplaced says that a value has another shape than its setting.
func misplaced(t reflect.Type, v any) string {
	switch reflect.ValueOf(v).Kind() {
	case reflect.Slice, reflect.Array:
		return "it is a list, and one value is wanted"
	case reflect.Map:
		return "it is a group, and one value is wanted"
	}
	return cli.Misfit(kindName(t), fmt.Sprint(v))
}

// keysBelow lists the last words of the settings that there are at a place such as "", "log" or "namespaces[2]".
func keysBelow(dst any, where string) []string {
	t := reflect.Indirect(reflect.ValueOf(dst)).Type()
	for _, word := range strings.FieldsFunc(where, func(r rune) bool { return r == '.' }) {
		word, _, _ = strings.Cut(word, "[")
		i := slices.IndexFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return f.Tag.Get(tag) == word })
		if i < 0 {
			return nil
		}
		t = reflect.VisibleFields(t)[i].Type
		if t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return nil
		}
	}
	var list []string
	for _, f := range reflect.VisibleFields(t) {
		if k := f.Tag.Get(tag); k != "" && k != "-" {
			list = append(list, k)
		}
	}
	return list
}

var durationType = reflect.TypeFor[time.Duration]()

// durationHook reads "10s"; a number without unit is refused, because some would mean seconds.
func durationHook(from, to reflect.Type, data any) (any, error) {
	if to != durationType || from == durationType {
		return data, nil
	}
	s := fmt.Sprint(data)
	d, err := time.ParseDuration(s)
	if err != nil {
		return nil, errors.New(cli.Misfit("duration", s))
	}
	return d, nil
}

// numberHook refuses numbers that the decoder would make others of: negative ones where none
// can be, parts of one, truth values, and those that are to be one and are neither 0 nor 1.
func numberHook(from, to reflect.Type, data any) (any, error) {
	v := reflect.ValueOf(data)
	misfit := false
	switch k := to.Kind(); {
	case k >= reflect.Int && k <= reflect.Uint64 && to != durationType:
		misfit = v.Kind() == reflect.Bool || v.CanFloat() && v.Float() != math.Trunc(v.Float()) ||
			k >= reflect.Uint && (v.CanInt() && v.Int() < 0 || v.CanFloat() && v.Float() < 0)
	case k == reflect.Bool:
		misfit = v.CanInt() && v.Int() != 0 && v.Int() != 1 || v.CanUint() && v.Uint() > 1 || v.CanFloat()
	}
	if misfit {
		return nil, errors.New(cli.Misfit(kindName(to), fmt.Sprint(data)))
	}
	return data, nil
}

// stringHook refuses what the file's syntax has made a number or a truth value of
// where a text is wanted: 0010 would become "8", 1e3 "1000", a long serial number rounded.
func stringHook(from, to reflect.Type, data any) (any, error) {
	if to.Kind() != reflect.String || from.Kind() == reflect.String {
		return data, nil
	}
	switch from.Kind() {
	case reflect.Bool, reflect.Float32, reflect.Float64:
	default:
		if from.Kind() < reflect.Int || from.Kind() > reflect.Uint64 {
			return data, nil
		}
	}
	return nil, fmt.Errorf("it was read as the %s %v and is to be a text: put it in quotes", from.Kind(), data)
}

// textHook lets types read themselves from a string.
func textHook(from, to reflect.Type, data any) (any, error) {
	s, ok := data.(string)
	if n, isInt := data.(int); isInt {
		s, ok = strconv.Itoa(n), true
	}
	if !ok || !reflect.PointerTo(to).Implements(reflect.TypeFor[interface{ UnmarshalText([]byte) error }]()) {
		return data, nil
	}
	p := reflect.New(to)
	if err := p.Interface().(interface{ UnmarshalText([]byte) error }).UnmarshalText([]byte(s)); err != nil {
		return nil, err
	}
	return p.Elem().Interface(), nil
}

// listHook takes one string for a list apart at commas (environment variables).
func listHook(from, to reflect.Type, data any) (any, error) {
	s, ok := data.(string)
	if !ok || to.Kind() != reflect.Slice {
		return data, nil
	}
	list := []any{}
	for p := range strings.SplitSeq(s, ",") {
		if p = strings.TrimSpace(p); p != "" {
			list = append(list, p)
		}
	}
	return list, nil
}

// Changed lists the keys in which two settings structs of one type differ, sorted.
func Changed(a, b any) []string {
	fa, fb := flatten(a), flatten(b)
	var ks []string
	for _, k := range Keys(a) {
		va, vb := reflect.ValueOf(fa[k]), reflect.ValueOf(fb[k])
		if va.Kind() == reflect.Slice && va.Len() == 0 && vb.Len() == 0 {
			continue // nil and empty are the same setting
		}
		if !reflect.DeepEqual(fa[k], fb[k]) {
			ks = append(ks, k)
		}
	}
	return ks
}
